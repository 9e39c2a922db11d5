"""`mlxtune verify`: checks a run's files and adapters, and can replay its training."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxtune.backend.adapters import checkpoint_tensors
from mlxtune.backend.adapters.initialize import find_initial
from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.lora.apply import apply_lora
from mlxtune.backend.models import loading, model_folder
from mlxtune.commands.train import RunMode, run_training
from mlxtune.config import TrainConfig, as_path, user_cache
from mlxtune.config.objective_config import is_rewarded
from mlxtune.core.files.hashing import model_hash
from mlxtune.core.files.reading import file_hash, read_own
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.files.writing import copy_file, make_folder
from mlxtune.core.formatting import join_few, pluralize
from mlxtune.core.run.checkpoint import (
    ADAPTER,
    BEST,
    INITIAL_HASH,
    METRICS,
    Checkpoint,
    find_checkpoints,
)
from mlxtune.core.run.extension import extensions_of
from mlxtune.core.run.metrics import SkippedStep, StepRecord, ValidationRecord
from mlxtune.core.run.progress import Progress, Record
from mlxtune.core.run.replay_checks import (
    check_checkpoint_again,
    check_metrics,
    check_rates,
    checks_of_files,
    up_to,
)
from mlxtune.core.run.run_folder import EVALUATION, SAMPLE_RECORDS, ResumePoint
from mlxtune.core.run.stored_run import get_mapping, run_folder_at
from mlxtune.core.run.verification import Verification, verify_files
from mlxtune.core.training.observer import Callbacks
from mlxtune.core.training.schedule import schedule_of
from mlxtune.errors import (
    DataError,
    Interrupted,
    MlxTuneError,
    ModelError,
    OutputError,
    TrainingInterrupted,
)
from mlxtune.session.arguments import ResolvedOptions
from mlxtune.session.interrupt import interrupt_on_signal
from mlxtune.session.memory_planning import recorded_matmul
from mlxtune.session.resuming import check_asked_again, run_config
from mlxtune.views.output import print_json, print_line

# What neither the files nor a replay can confirm.
_UNCHECKED_FACTS = "times, memory, versions and device, and the page"


def verify(
    run: str | Path, *, replay: bool = False, model_path: str = "", reward: Sequence[str] = ()
) -> Verification:
    """Check a run's files, its records, and its adapters against the base model.

    With `replay`, also retrain from the first checkpoint (from the start if there is only one) to
    the end of a finished run, or else to the newest checkpoint, judge a finished run again, and
    compare the results. `model_path` is the current folder of the base model, and `reward` has the
    rewards of another user's run, which are code, for its replay.

    Raises OutputError if there is no such run. Problems in the run are returned, not raised.
    """
    folder = run_folder_at(as_path(str(run)))
    result, good = verify_files(folder)
    if not good:
        return result
    rewarded = is_rewarded(get_mapping(good[0].metadata, "config").get("objective"))
    if rewarded or os.path.lexists(folder / SAMPLE_RECORDS):
        result.attempt(SAMPLE_RECORDS, partial(_check_samples, result, folder, good))
    overrides: dict[str, Any] = {"model_path": model_path} if model_path else {}
    overrides |= {"reward": tuple(reward)} if reward else {}
    config: TrainConfig | None = None
    with _adding_errors(result, "model"):
        check_asked_again(folder, good[0], overrides, ["model_path"])
        config = run_config(folder, good[0], overrides)
        _verify_model(result, config, good)
    if replay and config is not None:
        with _adding_errors(result, "replay"):
            # Only a replay reads the data, and runs rewards.
            check_asked_again(folder, good[0], overrides, ["data", "val_data", "reward"])
            _replay(result, config, good)
    return result


@contextmanager
def _adding_errors(result: Verification, name: str) -> Iterator[None]:
    """Add an error as a check that fails."""
    try:
        yield
    except DataError as problem:
        # Drop advice on options such as --data, which `verify` does not have.
        text, advised, _ = problem.with_flags.partition(": check --")
        result.add("data", f"{text}: bring it back" if advised else text, "")
    except MlxTuneError as problem:
        result.add(name, str(problem), "")


def _check_samples(result: Verification, run: Path, good: list[Checkpoint]) -> str:
    # Only runs that learn from rewards have samples, and import the rewards.
    from mlxtune.rewards.sample_checks import check_samples

    return check_samples(run, good, finished=result.finished)


def _compare_samples(run: Path, repeated: Path, replay: "_Replay") -> str:
    """Compare the samples of the repeated steps. Raises OSError, or ValueError for a difference."""
    from mlxtune.core.run.sampled_answers import read_groups

    def drawn(folder: Path) -> list[Any]:
        groups = list(read_groups(folder / SAMPLE_RECORDS))
        return [each for each in groups if replay.start < each.step <= replay.step]

    own = drawn(run)
    drawn_again = drawn(repeated)
    differing = (one for one, other in zip(own, drawn_again, strict=False) if one != other)
    if (first := next(differing, None)) is not None:
        raise ValueError(f"step {first.step} gives other samples for {first.row}")
    if len(own) != len(drawn_again):
        raise ValueError("another number of samples")
    return f"{pluralize(len(own), 'prompt')} answered again"


def main(
    run: str, *, replay: bool, model_path: str, reward: tuple[str, ...], as_json: bool
) -> bool:
    """Print each check as a line, or all as JSON. Return whether all passed."""
    result = verify(run, replay=replay, model_path=model_path, reward=reward)
    if as_json:
        print_json(result.as_dict())
        return result.ok
    width = max(len(check.name) for check in result.checks) + 2
    for check in result.checks:
        print_line(f"{'ok' if check.ok else 'BAD':<4}{check.name:<{width}}{check.detail}")
    print_line(f"{'--':<4}{'not checked':<{width}}{_UNCHECKED_FACTS}")
    bad = sum(not check.ok for check in result.checks)
    checks = f"{len(result.checks)} checks"
    print_line(f"{result.run}: {checks}, {f'{bad} failed' if bad else 'all passed'}")
    return result.ok


def _verify_model(result: Verification, config: TrainConfig, good: list[Checkpoint]) -> None:
    """Check the base model's hash, and each adapter's names and shapes, without loading weights."""
    folder = model_folder.find_folder(config.model_path)
    unchanged = model_hash(folder, user_cache()) == good[0].metadata.get("base_hash")
    changed = f"{folder}: its weights differ from those at the start of the run"
    result.add("base model", None if unchanged else changed, str(folder))
    base = loading.open_base(folder, config.dtype, config.base_options())
    summary = apply_lora(base.model, config.pipeline_config())
    for checkpoint in reversed(good):
        name = f"{checkpoint.folder.name}/{ADAPTER}"
        try:
            count = checkpoint_tensors.check_tensors_fit(
                checkpoint.folder / ADAPTER, base.model, summary
            )
        except ModelError as problem:
            result.add(name, str(problem), "")
        else:
            result.add(name, None, f"{count} tensors with the model's names and shapes")


def _differing(good: list[Checkpoint], again: Path, last: int) -> list[str]:
    """Return the checkpoints before the last step whose adapters differ from those in `again`."""
    trained = {each.step: file_hash(each.folder / ADAPTER) for each in find_checkpoints(again)[0]}
    return [
        checkpoint.folder.name
        for checkpoint in good
        if checkpoint.step < last and checkpoint.step in trained
        if file_hash(checkpoint.folder / ADAPTER) != trained[checkpoint.step]
    ]


def _resume_point(checkpoint: Checkpoint) -> ResumePoint:
    return ResumePoint(checkpoint, Progress.from_jsonl(checkpoint.metrics), [], {})


@dataclass(frozen=True)
class _Replay:
    """What a replay repeats: the records of a run up to `step`, after the checkpoint `resumed`.

    With `whole`, the run is finished, and the replay writes its adapter and judges it too.
    """

    records: list[Record]
    step: int
    resumed: ResumePoint | None
    whole: bool
    newest: Checkpoint

    @classmethod
    def of(cls, good: list[Checkpoint], *, finished: bool) -> "_Replay":
        """Choose the steps between the oldest checkpoint, or the start, and the end."""
        newest, first = good[0], good[-1]
        records = Progress.from_jsonl(newest.metrics)
        whole = False
        if finished:
            written = Progress.from_jsonl(read_own(newest.run / METRICS))
            # If the run was extended afterwards, no checkpoint has its last options.
            whole = written.step <= newest.metadata.get("total_steps", 0)
            records = written if whole else records
        step = records.step
        resumed = _resume_point(first) if first.step < step else None
        return cls(list(records), step, resumed, whole, newest)

    @property
    def start(self) -> int:
        return self.resumed.checkpoint.step if self.resumed else 0

    def train(self, config: TrainConfig, resumed: ResumePoint | None, mode: RunMode) -> None:
        """Train as the run did, with the options of `config`."""
        with _interrupts():
            run_training(ResolvedOptions.recorded(config, self.newest, resumed), mode)

    def train_to(self, config: TrainConfig, step: int, resumed: ResumePoint | None) -> None:
        """Train to a step, or to the end of the run."""
        with suppress(TrainingInterrupted):
            self.train(config, resumed, RunMode(stop_after=step))


def _train_again(config: TrainConfig, newest: Checkpoint, replay: _Replay) -> str | None:
    """Train as the run did, in the folder of `config`; return why the end was not reached, if so.

    Before an extension, train with the options of that time, on which the learning rates depend.
    """
    resumed = replay.resumed
    validated = {each.step for each in replay.records if isinstance(each, ValidationRecord)}
    for extension in extensions_of(newest.metadata):
        if extension.step <= replay.start:
            continue
        own = replace(config, epochs=extension.epochs, max_steps=extension.max_steps)
        # A complete run was also validated at its end.
        complete = extension.step == extension.total_steps and extension.step in validated
        replay.train_to(own, extension.step + complete, resumed)
        written, _ = find_checkpoints(config.checkpoint_path)
        resumed = _resume_point(written[0])
    if replay.whole:
        try:
            replay.train(config, resumed, RunMode())
        except ModelError as error:
            # Training that ends elsewhere may look for a best checkpoint that the run never had.
            return str(error)
    else:
        # One step more, for what the run recorded after the last step: a validation, an epoch.
        ended = not isinstance(replay.records[-1], StepRecord | SkippedStep)
        replay.train_to(config, replay.step + ended, resumed)
    return None


@contextmanager
def _interrupts() -> Iterator[None]:
    """Raise a signal's interrupt: a partial replay proves nothing, and its folder is removed."""
    try:
        yield
    except TrainingInterrupted as stopped:
        if not stopped.by_signal:
            raise
        interrupt = Interrupted()
        interrupt.signal = stopped.signal
        raise interrupt from None


def _replay(result: Verification, config: TrainConfig, good: list[Checkpoint]) -> None:
    """Train again from the first checkpoint to the newest, or to the end of a finished run."""
    newest, run = good[0], good[0].run
    try:
        replay = _Replay.of(good, finished=result.finished)
    except (OSError, ValueError) as problem:
        result.add("replay", f"{METRICS}: {problem}", "")
        return
    no_start = _missing_start(config, newest)
    if replay.resumed is None and no_start:
        result.add("replay", f"{no_start}: bring it back", "")
        return
    with interrupt_on_signal(), scratch_folder("verify") as scratch:
        replayed = replace(
            config,
            output=str(scratch / ADAPTER),
            checkpoint_dir=str(scratch / "checkpoints"),
            quiet=True,
            # The checkpoints on the way are compared too.
            keep=max(config.keep, len(good) + 1),
            # Timing the matmuls again might change the choice of --quantized-compute auto.
            quantized_compute=recorded_matmul(newest.metadata) or config.quantized_compute,
            # A replay needs no tracker or profile.
            track=(),
            profile_interval=0,
            samples=config.samples if replay.whole else 0,
        )
        if replay.resumed is not None:
            _copy_state(run, replay.resumed.checkpoint, scratch / "checkpoints")
        unended = _train_again(replayed, newest, replay)
        _compare(result, good, replay, scratch, unended, no_start)
        if (run / SAMPLE_RECORDS).exists():  # another check reports that it is missing
            compare = partial(_compare_samples, run, scratch / "checkpoints", replay)
            result.attempt("samples", compare)
        rates = partial(_rate, config, newest)
        result.add("learning rates", check_rates(replay.records, rates), "as the options give them")
        if replay.resumed is not None:
            _check_earlier(result, replayed, replay, scratch / "first", no_start)


def _missing_start(config: TrainConfig, newest: Checkpoint) -> str:
    """Return why the adapter from which a run started cannot be used; empty if it can be."""
    if config.init_adapter is None:
        return ""
    try:
        find_initial(config.init_adapter, newest.metadata.get(INITIAL_HASH))
    except ModelError as error:
        text, moved, _ = error.with_flags.partition(": check --")
        if moved:
            return f"the adapter from which the run started is missing: {text}"
        return f"the run did not start from {config.init_adapter}, which has changed"
    return ""


def _rate(config: TrainConfig, newest: Checkpoint, step: int) -> float:
    """Return the learning rate that a run's options, at the time of a step, give it."""
    total = newest.metadata.get("total_steps", 0)
    until = (each.total_steps for each in extensions_of(newest.metadata) if step <= each.step)
    return schedule_of(config.trainer_config(), config.peak_rate, next(until, total))(step)


def _check_earlier(
    result: Verification, config: TrainConfig, replay: _Replay, scratch: Path, no_start: str
) -> None:
    """Repeat the validation before the first step, and say which steps were not repeated."""
    name, rest = "earlier steps", f"steps 1 to {replay.start} were not repeated"
    own = [each for each in replay.records if isinstance(each, ValidationRecord)]
    if not own:
        result.add(name, None, rest)
        return
    if no_start:
        result.add(name, None, f"{rest}, nor was the validation before them")
        return
    losses: list[float] = []
    config = replace(config, output=str(scratch / ADAPTER), checkpoint_dir=str(scratch))
    with suppress(TrainingInterrupted):
        callbacks = Callbacks(None, lambda step, loss: losses.append(loss))
        replay.train(config, None, RunMode(stop_after=0, observers=[callbacks]))
    problem = None
    if losses != [each.val_loss for each in own if each.step == 0]:
        problem = f"the validation before the first step gives {losses[0]:.6g}"
        problem += "" if on_cpu() else ", perhaps by rounding: see docs/reliability.md on GPUs"
    result.add(name, problem, f"{rest}, apart from the validation before them")


def _copy_state(run: Path, first: Checkpoint, again: Path) -> None:
    """Copy the files of a run that a replay from its first checkpoint adds to, or may end with."""
    make_folder(again)
    if (run / SAMPLE_RECORDS).exists():
        from mlxtune.rewards.samples import copy_samples

        copy_samples(run / SAMPLE_RECORDS, again / SAMPLE_RECORDS, first.step)
    if first.folder.name == BEST:
        make_folder(again / BEST)
        for path in first.folder.iterdir():
            copy_file(path, again / BEST / path.name)


def _compare(
    result: Verification,
    good: list[Checkpoint],
    replay: _Replay,
    scratch: Path,
    unended: str | None,
    no_start: str,
) -> None:
    """Compare a run with its replay, and with what needs no steps of it."""
    newest, again = good[0], scratch / "checkpoints"
    start = f"trained again from step {replay.start} to {replay.step}"
    written, _ = find_checkpoints(again)
    at_end = [each for each in written if each.step == newest.step]
    if not written:
        raise OutputError(f"{result.run}: training again wrote no checkpoint: {unended}")
    at_end.sort(key=lambda each: each.folder.name != newest.folder.name)
    records = list(Progress.from_jsonl(read_own(again / METRICS)))
    if not replay.whole:
        records = up_to(records, replay.step)[: len(replay.records)]
    problem = _difference(good, at_end, replay, records) or unended
    if problem is not None:
        problem = f"{start}: {problem}"
        if written[0].metadata.get("data_hash") != newest.metadata.get("data_hash"):
            problem += ", because the data gives different examples than the run was trained on"
        elif not on_cpu():
            problem += ", perhaps by rounding: see docs/reliability.md on GPUs"
    elif between := _differing(good, again, newest.step):
        problem = f"{start}: the same bytes, but not at {join_few(between)}"
    result.add("replay", problem, f"{start}: the same bytes")
    if replay.whole and problem is None:
        for name, check in checks_of_files(newest.run, again):
            if name == EVALUATION and no_start:  # it compares with that adapter
                check = lambda: f"not judged again: {no_start}"  # noqa: E731
            result.attempt(f"{name} again", check)


def _difference(
    good: list[Checkpoint], again: list[Checkpoint], replay: _Replay, records: list[Record]
) -> str | None:
    """Return the first difference between a run's newest checkpoint or records and the replay's."""
    newest = good[0]
    if again and file_hash(again[0].folder / ADAPTER) != file_hash(newest.folder / ADAPTER):
        return "the adapter differs"
    if (other := check_metrics(replay.records, records)) is not None:
        return f"the metrics differ: the run has {other}"
    names = {each.folder.name: each.folder for each in again}
    for own in good:
        if own.step == newest.step and own.folder.name in names:
            file = check_checkpoint_again(own, names[own.folder.name])
            if file is not None:
                return f"{file} of {own.folder.name} differs"
    return None
