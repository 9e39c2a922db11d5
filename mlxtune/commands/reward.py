"""`mlxtune reward`: tries rewards on rows before any training, and prints the table.

Each reward scores the row's own answer, the answer of another row, and an empty answer, or answers
from a file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from mlxtune.config import DataConfig, RewardConfig, as_path
from mlxtune.config.data_config import parse_fields
from mlxtune.core.data.problems import BadRow, SkippedRows, where
from mlxtune.core.data.prompt import PromptRow, read_prompts
from mlxtune.core.data.sources.rows import read_objects
from mlxtune.core.formatting import pluralize
from mlxtune.errors import DataError, as_called
from mlxtune.rewards.functions import RewardSpec, parse_rewards
from mlxtune.rewards.scoring import Completion, Reward, RewardScorer
from mlxtune.views.output import print_json, print_line
from mlxtune.views.terminal import plain_table, result_console
from mlxtune.views.visible import escape

OWN, OTHER, EMPTY, GIVEN = "the row's", "another row's", "empty", "from the file"
_MAX_PROBLEMS = 10
_WIDTH = 30


@dataclass(frozen=True)
class Tried:
    """An answer that was scored; `kind` says where it comes from."""

    kind: str
    completion: Completion
    reward: Reward

    def as_dict(self) -> dict[str, Any]:
        place, text = self.completion.place, self.completion.text
        return {"row": place, "kind": self.kind, "answer": text, **asdict(self.reward)}


@dataclass(frozen=True)
class RewardTrial:
    """The rewards of all answers that were tried."""

    rewards: tuple[RewardSpec, ...]
    answers: list[Tried]

    @property
    def problems(self) -> list[str]:
        return [problem for each in self.answers for problem in each.reward.problems]

    @property
    def means(self) -> dict[str, dict[str, float | None]]:
        """The mean of each reward and of the sums, by kind of answer; None without any value."""
        result = {}
        for kind in dict.fromkeys(each.kind for each in self.answers):
            rewards = [each.reward for each in self.answers if each.kind == kind]
            values = {
                spec.name: [each.values[spec.name] for each in rewards] for spec in self.rewards
            }
            values["sum"] = [each.total for each in rewards]
            known = {name: [v for v in each if v is not None] for name, each in values.items()}
            result[kind] = {name: fmean(each) if each else None for name, each in known.items()}
        return result

    @property
    def constant(self) -> list[str]:
        """The names of the rewards that give all answers the same value."""
        values = {
            spec.name: {each.reward.values[spec.name] for each in self.answers}
            for spec in self.rewards
        }
        return [
            name
            for name, each in values.items()
            if len(self.answers) > 1 and len(each) == 1 and each != {None}
        ]


def try_rewards(config: RewardConfig) -> RewardTrial:
    """Score answers to the first rows of the data.

    Raises ConfigError for a reward that cannot be used, or DataError.
    """
    rewards = parse_rewards(config.reward)
    rows = _rows(config)
    answers = list(_answers(rows) if config.answers is None else _from_file(config.answers, rows))
    completions = [completion for _, completion in answers]
    with RewardScorer(rewards, config.reward_timeout) as scorer:
        scored = scorer.score(completions)
    pairs = zip(answers, scored, strict=True)
    return RewardTrial(rewards, [Tried(*answer, reward) for answer, reward in pairs])


def show(config: RewardConfig) -> bool:
    """Print the table or JSON; return whether every answer has a reward."""
    trial = try_rewards(config)
    if config.json:
        print_json(
            {
                "rewards": [{"name": each.name, "weight": each.weight} for each in trial.rewards],
                "answers": [each.as_dict() for each in trial.answers],
                "means": trial.means,
            }
        )
    else:
        _print(trial)
    for problem in trial.problems[:_MAX_PROBLEMS]:
        print_line(f"no reward: {as_called(problem)}", stderr=True)
    if (more := len(trial.problems) - _MAX_PROBLEMS) > 0:
        print_line(f"no reward: {more} more", stderr=True)
    for name in trial.constant:
        print_line(
            f"warning: {name} gives all of these answers the same value: a reward without "
            "differences teaches nothing",
            stderr=True,
        )
    return not trial.problems


def _print(trial: RewardTrial) -> None:
    console, names = result_console(), [each.name for each in trial.rewards]
    rows = [
        [
            *(_file_name(each.completion.place), each.kind, _short(each.completion.text)),
            *map(_number, (*each.reward.values.values(), each.reward.total)),
        ]
        for each in trial.answers
    ]
    weights = [
        each.name if each.weight == 1 else f"{each.name} × {each.weight:g}"
        for each in trial.rewards
    ]
    console.print(plain_table(["row", "answer", "text", *weights, "sum"], rows))
    means = [
        [kind, *(_number(mean[name]) for name in (*names, "sum"))]
        for kind, mean in trial.means.items()
    ]
    console.print()
    console.print(plain_table(["mean of answers", *weights, "sum"], means))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _file_name(place: str) -> str:
    """Return `FILE:LINE` without the folder, which would take most of the line."""
    return place.rpartition("/")[2]


def _short(text: str) -> str:
    shown = escape(text)
    return shown if len(shown) <= _WIDTH else f"{shown[: _WIDTH - 1]}…"


def _rows(config: RewardConfig) -> list[PromptRow]:
    """Return the first usable rows of the data. Raises DataError if there is none."""
    # This import loads the backend, which no other part of the command needs.
    from mlxtune.session.dataset import find_data

    data = config.part(DataConfig, model_path="none", val_split=0.0)
    rows: list[PromptRow] = []
    for path in find_data(data).files.train:
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


def _answers(rows: Sequence[PromptRow]) -> Iterator[tuple[str, Completion]]:
    """Yield the answers to try: right ones, wrong ones and empty ones."""
    for number, row in enumerate(rows):
        if row.answer is not None:
            yield OWN, Completion.of(row, row.answer)
        following = (each.answer for each in (*rows[number + 1 :], *rows[:number]))
        other = next((each for each in following if each not in (None, row.answer)), None)
        if other is not None:
            yield OTHER, Completion.of(row, other)
        yield EMPTY, Completion.of(row, "")


def _from_file(name: str, rows: Sequence[PromptRow]) -> Iterator[tuple[str, Completion]]:
    """Yield the answers of a file that `generate --data` wrote for these rows. Raises DataError."""
    path, by_number = as_path(name), {row.number: row for row in rows}
    found = False
    for number, content in read_objects(path):
        place = where(path, number)
        if isinstance(content, BadRow):
            raise DataError(f"{place}: {content}")
        text, row = content.get("answer"), content.get("row")
        if not isinstance(text, str) or not isinstance(row, int):
            raise DataError(f"{place}: no 'row' and 'answer': pass what generate --data writes")
        if row in by_number:
            found = True
            yield GIVEN, Completion.of(by_number[row], text)
    if not found:
        first = pluralize(len(rows), "row")
        raise DataError(f"{path} has no answer to the first {first}: raise --rows")
