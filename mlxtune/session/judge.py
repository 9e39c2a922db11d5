"""Judges whether an adapter helped: compares losses and answers without and with the adapter."""

import operator
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.device import allocator
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.step.evaluator import Evaluator
from mlxtune.backend.text.generate import Sampling, answer_prompts
from mlxtune.backend.text.tokenizer import ModelTokenizer
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.config import EvalConfig, UseConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.prompt import LastTurn, TurnEnds, last_turn
from mlxtune.core.data.text_stream import text_of
from mlxtune.core.evaluation.matching import count_exact, count_matches, matcher
from mlxtune.core.evaluation.outcome import AnswersAtStep, Evaluation, Generated, Sample
from mlxtune.core.evaluation.row_losses import (
    AnswerLossSums,
    ComputeLosses,
    RowLossSums,
    answer_sums,
    sums_of,
)
from mlxtune.core.evaluation.verdict import JudgedRows, evaluate_losses, evaluate_preferences
from mlxtune.core.evaluation.verdict_text import file_verdict_lines, verdict_lines
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.files.writing import write_json
from mlxtune.core.formatting import pluralize
from mlxtune.core.objectives.objective import SFT, Objective
from mlxtune.core.run.run_folder import EVALUATION, EVALUATION_HASH, LIVE_ANSWERS, RESULT
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.errors import MlxTuneError
from mlxtune.session.reader import Reader
from mlxtune.session.run_session import RunSession
from mlxtune.session.trained_model import (
    LoadedModel,
    UseSession,
    load_model,
    unchanged_initial,
    warn_of_base,
)
from mlxtune.views.console import VERDICT, RunConsole
from mlxtune.views.run_text import less_likely_line

if TYPE_CHECKING:
    from mlxtune.session.rewarding import RewardSession

_Measured = TypeVar("_Measured")
_Sums = TypeVar("_Sums", RowLossSums, AnswerLossSums)
# The losses of rows, or of their answers under a preference objective.
LossSums: TypeAlias = RowLossSums | AnswerLossSums
_SumLosses: TypeAlias = Callable[[CorpusRows, ComputeLosses, Callable[[int, int], None]], _Sums]

# The largest number of tokens in a sample answer at the end of a run.
_MAX_SAMPLE_TOKENS = 128
_NOTHING_TO_ANSWER = "no row has a prompt and a whole answer (plain text has neither)"
# The largest number of tokens in a sample answer after a validation: training waits for the answer.
_MAX_LIVE_TOKENS = 64


def compare_losses(
    loaded: LoadedModel,
    judged: JudgedRows,
    seed: int,
    console: RunConsole,
    workers: Workers = SINGLE_PROCESS,
    start: LossSums | None = None,
    objective: Objective = SFT,
) -> Evaluation:
    """Compute the losses of rows without and with the adapter, and compare them.

    `start` holds the losses under the adapter from which training started.
    """
    models = (False,) if loaded.adapted is None else (False, True)

    def measure(sum_losses: _SumLosses[_Sums]) -> tuple[_Sums, _Sums | None]:
        sums = _sums(loaded, judged.rows, models, console, workers, sum_losses)
        return sums[0], None if loaded.adapted is None else sums[1]

    if objective.is_sft:
        assert not isinstance(start, AnswerLossSums)
        return evaluate_losses(judged, *measure(sums_of), seed, start)
    assert not isinstance(start, RowLossSums)
    return evaluate_preferences(judged, objective, *measure(answer_sums), seed, start)


def _adapter_losses(
    loaded: LoadedModel,
    rows: CorpusRows,
    console: RunConsole,
    objective: Objective,
    workers: Workers = SINGLE_PROCESS,
) -> LossSums:
    """Sum the losses of rows with the adapter."""
    if objective.is_sft:
        return _sums(loaded, rows, (True,), console, workers, sums_of)[0]
    return _sums(loaded, rows, (True,), console, workers, answer_sums)[0]


def _sums(
    loaded: LoadedModel,
    rows: CorpusRows,
    models: Sequence[bool],
    console: RunConsole,
    workers: Workers,
    sum_losses: _SumLosses[_Sums],
) -> list[_Sums]:
    """Sum the losses of rows without or with the adapter; each worker computes a part.

    Returns the sums for each of `models`: False is the base model, True the adapter.
    """
    base, totals = loaded.base, []
    with closing(Evaluator(base, console.warn, workers=workers)) as evaluator:
        for with_adapter in models:
            loaded.use_adapter(with_adapter)
            show = _show(console, "evaluating", with_adapter)
            totals.append(sum_losses(rows, evaluator.losses, show))
    console.close()
    return totals


def answer_sample(
    loaded: LoadedModel,
    reader: Reader,
    rows: CorpusRows,
    max_new_tokens: int,
    console: RunConsole,
    match: str = "exact",
    against: Sequence[str] | None = None,
) -> Generated:
    """Answer the last turn of each row greedily, without and with the adapter.

    Counts exact matches and, with another `match`, also the answers that match by that rule.
    `against` are the answers of another adapter to the same rows.
    """
    tokenizer = reader.tokenizer
    turns = _last_turns(rows, reader.turn_ends)
    if not turns:
        console.warn(f"nothing is generated: {_NOTHING_TO_ANSWER}")
    generate = partial(_answers, loaded, tokenizer, turns, max_new_tokens, console)
    base = generate(with_adapter=False)
    adapted = None if loaded.adapted is None else generate(with_adapter=True)
    exact = match == "exact"
    same = operator.eq if exact else matcher(match, console.warn)
    samples = []
    for number, (i, turn) in enumerate(turns):
        path, row = rows.source(i)
        expected = text_of(tokenizer.token_bytes(turn.answer)).removesuffix(turn.prompt.end_text)
        answer = base[number] if adapted is None else adapted[number]
        other = None if against is None else against[number]
        samples.append(
            Sample(
                path=path,
                row=row,
                prompt=text_of(tokenizer.token_bytes(turn.prompt.ids)),
                expected=expected,
                base=base[number],
                adapted=None if adapted is None else answer,
                right=same(answer, expected),
                against=other,
                against_right=None if other is None else same(other, expected),
            )
        )
    by_rule = None if exact else count_matches(samples, match, same)
    return Generated(len(samples), count_exact(samples), samples, by_rule)


def _last_turns(rows: CorpusRows, ends: TurnEnds) -> list[tuple[int, LastTurn]]:
    """Return the rows that have a prompt and a complete answer, by index, with the turn."""
    return [(i, turn) for i, row in enumerate(rows) if (turn := last_turn(row, ends)) is not None]


def _answers(
    loaded: LoadedModel,
    tokenizer: ModelTokenizer,
    turns: Sequence[tuple[int, LastTurn]],
    max_new_tokens: int,
    console: RunConsole,
    *,
    with_adapter: bool,
) -> list[str]:
    loaded.use_adapter(with_adapter)
    show, sampling = (
        _show(console, "answering", with_adapter),
        Sampling(max_new_tokens=max_new_tokens),
    )
    prompts = [turn.prompt for _, turn in turns]
    return answer_prompts(
        loaded.base.model, tokenizer, prompts, sampling, loaded.base.vocab_size, show
    )


@dataclass(frozen=True)
class AdapterMeasurement:
    """The losses and answers of the adapter to compare with."""

    sums: LossSums
    answers: list[str] | None


def measure_adapter(
    config: UseConfig,
    adapter: AdapterFile,
    folder: Path,
    measure: Callable[[LoadedModel], _Measured],
    workers: Workers = SINGLE_PROCESS,
) -> _Measured:
    """Measure a model with an adapter; it is freed before another is loaded. Raises ModelError."""
    console = RunConsole(quiet=True)
    warn_of_base(adapter, folder, console)
    loaded = load_model(config, adapter, folder, console, workers)
    measured = measure(loaded)
    del loaded
    allocator.release()
    return measured


def losses_and_answers(
    use: UseSession[EvalConfig],
    rows: CorpusRows,
    reader: Reader,
    objective: Objective,
    loaded: LoadedModel,
) -> AdapterMeasurement:
    """Compute the losses of rows under another adapter.

    With --generate, also the answers of the adapter of --against.
    """
    config, console = use.config, use.console
    sums = _adapter_losses(loaded, rows, console, objective)
    texts = None
    if config.generate and config.against is not None:
        turns, longest = _last_turns(rows, reader.turn_ends), config.max_new_tokens
        texts = _answers(loaded, reader.tokenizer, turns, longest, console, with_adapter=True)
    return AdapterMeasurement(sums, texts)


class ValidationAnswers(TrainingObserver):
    """Answers some validation rows after each validation, for the live page."""

    def __init__(self, session: RunSession, base: BaseModel) -> None:
        self._session, self._rows = session, session.dataset.rows.validation
        self._loaded = LoadedModel(base, None)
        self._works = True

    def on_validation(self, step: int, loss: float) -> None:
        """Write the current model's answers to the run's folder."""
        # An error must not fail the run, so it only stops further answers.
        try:
            if self._works:
                self._answer(step)
        except Exception:  # noqa: BLE001
            self._works = False

    def _answer(self, step: int) -> None:
        config, reader = self._session.config, self._session.reader
        if sample := _draw(self._rows, config.samples, config.seed, reader):
            quiet = RunConsole(quiet=True)
            generated = answer_sample(self._loaded, reader, sample, _MAX_LIVE_TOKENS, quiet)
            content = asdict(AnswersAtStep(step, generated.samples))
            write_json(config.checkpoint_path / LIVE_ANSWERS, content)


def judge(
    session: RunSession,
    judged: JudgedRows,
    rewards: "RewardSession | None" = None,
    initial_hash: str | None = None,
) -> Evaluation | None:
    """Report whether a run's adapter, read back from its file, helps on the validation rows.

    Compares this adapter with the adapter from which training started, whose SHA-256 is
    `initial_hash`, or else with the base model.
    The run has ended and its adapter is written, so problems are only warnings. The losses come
    first, because users wait for the verdict; the sample answers only serve the run's page.
    """
    config, console = session.config, session.console
    try:
        loaded, evaluation = _evaluate_run(session, judged, rewards, initial_hash)
        _write_evaluation(config.checkpoint_path, evaluation)
    except MlxTuneError as problem:
        console.warn(f"the adapter was written, but could not be evaluated: {problem}")
        return None
    except KeyboardInterrupt:
        console.warn("the adapter was written, but not evaluated: run mlxtune eval for a verdict")
        raise
    for number, line in enumerate([*verdict_lines(evaluation), *file_verdict_lines(evaluation)]):
        name, outcome = ("", None) if number else (VERDICT, evaluation)
        console.say(name, line, evaluation=outcome)
    if (problem_line := less_likely_line(evaluation, config.objective)) is not None:
        console.warn(problem_line)
    if not config.samples or evaluation.generated is not None:
        return evaluation
    return _with_samples(session, judged, loaded, evaluation)


def _evaluate_run(
    session: RunSession,
    judged: JudgedRows,
    rewards: "RewardSession | None",
    initial_hash: str | None,
) -> tuple[LoadedModel, Evaluation]:
    """Load a run's adapter from its file and evaluate it; return the model too."""
    config, console, workers = session.config, session.console, session.workers
    adapter = AdapterFile(config.output_path)
    # The adapter's own config says how the base was quantised.
    use = config.part(UseConfig, adapter=str(adapter.path), quantize=None, double_quant=False)

    def load() -> LoadedModel:
        return load_model(use, adapter, session.folder, RunConsole(quiet=True), workers)

    # The starting point's model is freed before the adapter's is loaded.
    if rewards is not None:
        measure_rewards = partial(rewards.measure, judged.rows)
        answers = _before_training(session, initial_hash, measure_rewards)
        loaded = load()
        return loaded, rewards.compare(loaded, judged, answers, config.samples)
    objective = Objective.of(config)
    start = _before_training(
        session,
        initial_hash,
        lambda initial: _adapter_losses(initial, judged.rows, console, objective, workers),
    )
    loaded = load()
    return loaded, compare_losses(loaded, judged, config.seed, console, workers, start, objective)


def _with_samples(
    session: RunSession, judged: JudgedRows, loaded: LoadedModel, evaluation: Evaluation
) -> Evaluation:
    """Return a run's evaluation with sample answers, and write it; problems are warnings."""
    config, console = session.config, session.console
    try:
        if sample := _draw(judged.rows, config.samples, config.seed, session.reader):
            allocator.release()
            generated = answer_sample(loaded, session.reader, sample, _MAX_SAMPLE_TOKENS, console)
            evaluation = replace(evaluation, generated=generated)
            _write_evaluation(config.checkpoint_path, evaluation)
            console.say("Samples", f"{pluralize(generated.rows, 'row')} answered, for the report")
        else:
            console.say("Samples", f"none: {_NOTHING_TO_ANSWER}")
    except MlxTuneError as problem:
        console.warn(f"no sample answers: {problem}")
    except KeyboardInterrupt:
        console.warn("interrupted: no sample answers; run mlxtune eval --generate for them")
    finally:
        console.close()
    return evaluation


def _write_evaluation(run: Path, evaluation: Evaluation) -> None:
    """Write a run's evaluation, and put its hash into the result. Raises OutputError."""
    write_json(run / EVALUATION, evaluation.as_dict())
    with suppress(OSError, ValueError, MlxTuneError):  # only `mlxtune verify` needs the hash
        result = {**read_json(run / RESULT), EVALUATION_HASH: file_hash(run / EVALUATION)}
        write_json(run / RESULT, result)


def _before_training(
    session: RunSession, initial_hash: str | None, measure: Callable[[LoadedModel], _Measured]
) -> _Measured | None:
    """Measure the adapter from which training started.

    Returns None if there was none or, with a warning, if it has changed since then.
    """
    config, warn, workers = session.config, session.console.warn, session.workers
    if (named := config.init_adapter) is None:
        return None
    # Training may have taken days.
    initial = unchanged_initial(
        named, initial_hash, config.output_path, warn, session.initial, workers
    )
    if initial is None:
        return None
    use = config.part(UseConfig, adapter=named, quantize=config.quantize or "none")
    return measure_adapter(use, initial, session.folder, measure, workers)


def _draw(rows: CorpusRows, count: int, seed: int, reader: Reader) -> CorpusRows:
    """Draw random rows that have a prompt and a whole answer; return them in file order."""
    ends = reader.turn_ends
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    answerable = (i for i in order if last_turn(rows[i], ends) is not None)
    return CorpusRows(rows.corpus, [rows.indices[i] for i in sorted(islice(answerable, count))])


def _show(console: RunConsole, activity: str, with_adapter: bool) -> Callable[[int, int], None]:
    name = "the adapter" if with_adapter else "the base model"
    return lambda done, total: console.show(f"{activity} with {name}: {done:,} of {total:,}")
