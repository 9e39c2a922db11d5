"""`mlxtune reward`: tries rewards on rows before any training, and prints the table.

Each reward scores the row's own answer, the answer of another row, and an empty answer, or answers
from a file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice

from mlxtune.config import RewardConfig, as_path
from mlxtune.config.data_config import parse_fields
from mlxtune.core.data.problems import BadRowError, SkippedRows, where
from mlxtune.core.data.prompt import PromptRow, read_prompts
from mlxtune.core.data.sources.rows import read_objects
from mlxtune.core.formatting import pluralize
from mlxtune.errors import DataError, as_called
from mlxtune.rewards.functions import RewardSpec, parse_rewards
from mlxtune.rewards.scoring import Reward, RewardScorer, mean_of, with_remedy
from mlxtune.views.output import print_json, print_line
from mlxtune.views.terminal import plain_table, result_console
from mlxtune.views.visible import escape

_MAX_PROBLEMS, _WIDTH = 10, 30
# The kinds of answers: right ones, and wrong ones with a noun for them.
_OWN, _OTHER, _EMPTY = "the row's", "another row's", "empty"
_WRONG = {_OTHER: "a wrong answer", _EMPTY: "an empty answer"}

_NOUNS = {_OWN: "the row's answer", _OTHER: "another row's answer", _EMPTY: "an empty answer"}

# The kind of an answer, its row, its text, and its reward.
Answer = tuple[str, PromptRow, str]
Tried = tuple[str, PromptRow, str, Reward]


def main(config: RewardConfig) -> bool:
    """Print the table or JSON; return whether every answer has a reward.

    Raises ConfigError for a reward that cannot be used, or DataError.
    """
    rewards = parse_rewards(config.reward)
    rows = _rows(config)
    answers = list(_answers(rows) if config.answers is None else _from_file(config.answers, rows))
    with RewardScorer(rewards, config.reward_timeout) as scorer:
        tried = [(*answer, scorer.score(*answer[1:])) for answer in answers]
    scored = [reward for *_, reward in tried]
    means = {kind: _means(tried, kind) for kind in dict.fromkeys(kind for kind, *_ in answers)}
    if config.json:
        own = [
            {"row": row.place, "kind": kind, "answer": text, **asdict(reward)}
            for kind, row, text, reward in tried
        ]
        named = [{"name": each.name, "weight": each.weight} for each in rewards]
        print_json({"rewards": named, "answers": own, "means": means})
    else:
        names = [each.name + f" × {each.weight:g}" * (each.weight != 1) for each in rewards]
        _print(names, tried, means)
    problems = [
        (f" for {_NOUNS[kind]}" if kind in _NOUNS else "", problem)
        for kind, *_, reward in tried
        for problem in reward.problems
    ]
    advised = False
    for noun, problem in problems[:_MAX_PROBLEMS]:
        shown = problem if advised else with_remedy(problem)
        advised |= shown != problem
        print_line(f"no reward{noun}: {as_called(shown)}", stderr=True)
    if (more := len(problems) - _MAX_PROBLEMS) > 0:
        print_line(f"no reward: {more} more", stderr=True)
    for hint in filter(None, (each.hint for each in rewards)):
        print_line(f"warning: {hint}", stderr=True)
    is_constant = len({reward.total for reward in scored}) == 1
    ranked_wrongly = () if is_constant else _ranked_wrongly(means)
    # A right reward gives all empty answers the same.
    constant = _unanswered() if [*means] == [_EMPTY] else _constant(rewards, scored)
    for warning in (*constant, *ranked_wrongly):
        print_line(f"warning: {warning}", stderr=True)
    return not problems


def _constant(rewards: Sequence[RewardSpec], scored: Sequence[Reward]) -> Iterator[str]:
    for name in (each.name for each in rewards):
        values = {reward.values[name] for reward in scored}
        if len(scored) > 1 and len(values) == 1 and values != {None}:
            yield (
                f"{name} gives all of these answers the same value: a reward without differences "
                "teaches nothing"
            )


def _unanswered() -> Iterator[str]:
    yield (
        "the rows have no answers, so only empty ones are tried: sample some with mlxtune generate "
        "--data and --output, and pass them as --answers"
    )


def _ranked_wrongly(means: Mapping[str, Mapping[str, float | None]]) -> Iterator[str]:
    """Yield a warning for each kind of wrong answer that scores as high as the rows' answers."""
    sums = {kind: value for kind, each in means.items() if (value := each["sum"]) is not None}
    if (own := sums.get(_OWN)) is None:
        return
    for kind, worth in _WRONG.items():
        if (value := sums.get(kind)) is not None and value >= own:
            yield (
                f"{kind} answers get a mean of {_number(value)}, the rows' own {_number(own)}: "
                f"score {worth} lower than a right one"
            )


def _means(tried: Sequence[Tried], kind: str) -> dict[str, float | None]:
    """Return the mean of each reward, and of the sums, of one kind of answer."""
    scored = [{**reward.values, "sum": reward.total} for own, *_, reward in tried if own == kind]
    return {name: mean_of(each[name] for each in scored) for name in scored[0]}


def _print(
    names: Sequence[str], tried: Sequence[Tried], means: dict[str, dict[str, float | None]]
) -> None:
    console = result_console()
    rows = []
    for kind, row, text, reward in tried:
        shown = escape(text)
        shown = shown if len(shown) <= _WIDTH else f"{shown[: _WIDTH - 1]}…"
        # The folder of the file would take most of the line.
        start = [row.place.rpartition("/")[2], kind, shown]
        rows.append([*start, *map(_number, (*reward.values.values(), reward.total))])
    console.print(plain_table(["row", "answer", "text", *names, "sum"], rows))
    console.print()
    of_kinds = [[kind, *map(_number, values.values())] for kind, values in means.items()]
    console.print(plain_table(["mean of answers", *names, "sum"], of_kinds))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _rows(config: RewardConfig) -> list[PromptRow]:
    """Return the first usable rows of the data. Raises DataError if there is none."""
    # This import loads the backend, which no other part of the command needs.
    from mlxtune.session.dataset import find_named_data

    rows: list[PromptRow] = []
    for path in find_named_data(config.data).files.train:
        skipped = SkippedRows(path)
        read = read_prompts(path, skipped, format=config.format, fields=parse_fields(config.field))
        rows += islice(read, config.rows - len(rows))
        for warning in skipped.warnings():
            print_line(f"warning: {warning}", stderr=True)
        if not rows:
            raise DataError(f"{path} has no row with a prompt: give rows of sft, or a 'prompt'")
        if len(rows) == config.rows:
            break
    return rows


def _answers(rows: Sequence[PromptRow]) -> Iterator[Answer]:
    """Yield the answers to try: right ones, wrong ones and empty ones."""
    for number, row in enumerate(rows):
        if row.answer is not None:
            yield _OWN, row, row.answer
        following = (each.answer for each in (*rows[number + 1 :], *rows[:number]))
        other = next((each for each in following if each not in (None, row.answer)), None)
        if other is not None:
            yield _OTHER, row, other
        yield _EMPTY, row, ""


def _from_file(name: str, rows: Sequence[PromptRow]) -> Iterator[Answer]:
    """Yield the answers of a file that `generate --data` wrote for these rows. Raises DataError."""
    path, by_number, has_rows = as_path(name), {row.number: row for row in rows}, False
    for number, content in read_objects(path):
        place = where(path, number)
        if isinstance(content, BadRowError):
            raise DataError(f"{place}: {content}")
        text, row = content.get("answer"), content.get("row")
        if not isinstance(text, str) or not isinstance(row, int):
            raise DataError(f"{place}: no 'row' and 'answer': pass what generate --data writes")
        if row in by_number:
            has_rows = True
            yield "from the file", by_number[row], text
    if not has_rows:
        first = pluralize(len(rows), "row")
        raise DataError(f"{path} has no answer to the first {first}: raise --rows")
