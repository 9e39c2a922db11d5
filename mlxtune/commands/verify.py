"""`mlxtune verify`: checks a run's files and adapters, and can replay its training."""

from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from mlxtune.backend.adapters import checkpoint_tensors
from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.lora.apply import apply_lora
from mlxtune.backend.models import loading, model_folder
from mlxtune.commands.train import train
from mlxtune.config import TrainConfig, as_path, user_cache
from mlxtune.core.files.hashing import model_hash
from mlxtune.core.files.reading import file_hash, read_json, read_own
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.files.writing import copy_file, make_folder
from mlxtune.core.formatting import join_few
from mlxtune.core.run.checkpoint import (
    ADAPTER,
    METADATA,
    METRICS,
    Checkpoint,
    find_checkpoints,
)
from mlxtune.core.run.extension import extensions_of
from mlxtune.core.run.progress import Progress, same_except_measurements
from mlxtune.core.run.run_folder import REFERENCE, ResumePoint
from mlxtune.core.run.stored_run import run_folder_at
from mlxtune.core.run.verification import Verification, verify_files
from mlxtune.errors import (
    DataError,
    Interrupted,
    MlxTuneError,
    ModelError,
    OutputError,
    TrainingInterrupted,
)
from mlxtune.session.arguments import ResolvedOptions
from mlxtune.session.interrupt import end_in_order
from mlxtune.session.memory_planning import recorded_products
from mlxtune.session.resuming import check_asked_again, check_initial, run_config
from mlxtune.views.output import print_json, print_line


def verify(run: str | Path, *, replay: bool = False, model_path: str = "") -> Verification:
    """Check a run's files, its records, and its adapters against the base model.

    With `replay`, also retrain from the first checkpoint (from the start if there is only one) to
    the newest, and compare the results. `model_path` is the current folder of the base model.

    Raises OutputError if there is no such run. Problems in the run are returned, not raised.
    """
    folder = run_folder_at(as_path(str(run)))
    result, good = verify_files(folder)
    if not good:
        return result
    try:
        overrides = {"model_path": model_path} if model_path else {}
        # Only a replay reads the data.
        names = ["model_path", *(["data", "val_data"] if replay else [])]
        check_asked_again(folder, good[0], overrides, names)
        config = run_config(folder, good[0], overrides)
        _verify_model(result, config, good)
        if replay:
            _replay(result, config, good)
    except DataError as problem:
        # Drop advice on options such as --data, which `verify` does not have.
        text, advised, _ = str(problem.args[0]).partition(": check --")
        result.add("data", f"{text}: bring it back" if advised else text, "")
    except MlxTuneError as problem:
        result.add("model", str(problem), "")
    return result


def show(run: str, *, replay: bool, model_path: str, as_json: bool) -> bool:
    """Print each check as a line, or all as JSON. Return whether all passed."""
    result = verify(run, replay=replay, model_path=model_path)
    if as_json:
        print_json(result.as_dict())
        return result.ok
    width = max(len(check.name) for check in result.checks) + 2
    for check in result.checks:
        print_line(f"{'ok' if check.ok else 'BAD':<4}{check.name:<{width}}{check.detail}")
    bad = sum(not check.ok for check in result.checks)
    checks = f"{len(result.checks)} checks"
    print_line(f"{result.run}: {checks}, {f'{bad} failed' if bad else 'all passed'}")
    return result.ok


def _verify_model(result: Verification, config: TrainConfig, good: list[Checkpoint]) -> None:
    """Check the base model's hash, and each adapter's names and shapes, without loading weights."""
    folder = model_folder.find_folder(config.model_path)
    expected, actual = good[0].metadata.get("base_hash"), model_hash(folder, user_cache())
    changed = f"{folder}: its weights differ from those at the start of the run"
    result.add("base model", None if actual == expected else changed, str(folder))
    base = loading.open_base(folder, config.dtype, config.base_options())
    summary = apply_lora(base.model, config.pipeline_config())
    for checkpoint in reversed(good):
        name = f"{checkpoint.folder.name}/{ADAPTER}"
        try:
            count = checkpoint_tensors.check_adapter(
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


def _train_again(
    config: TrainConfig, newest: Checkpoint, resumed: ResumePoint | None
) -> Path | None:
    """Train to the step of the newest checkpoint; return the checkpoint written there, if any.

    Before an extension, train with the options of that time, on which the learning rates depend.
    """
    start = resumed.checkpoint.step if resumed else 0
    validated = {validation.step for validation in Progress.from_jsonl(newest.metrics).validations}
    for extension in extensions_of(newest.metadata):
        if extension.step <= start:
            continue
        own = replace(config, epochs=extension.epochs, max_steps=extension.max_steps)
        # A run that was complete had also been validated at its end.
        complete = extension.step == extension.total_steps and extension.step in validated
        _train_to(own, extension.step + complete, resumed)
        written, _ = find_checkpoints(config.checkpoint_path)
        resumed = _resume_point(written[0])
    return _train_to(config, newest.step, resumed)


def _train_to(config: TrainConfig, step: int, resumed: ResumePoint | None) -> Path | None:
    """Train to a step; return the checkpoint written there, or None if the run ended before."""
    try:
        train(ResolvedOptions.recorded(config), resume=resumed, stop_after=step)
    except TrainingInterrupted as stopped:
        if stopped.by_signal or stopped.checkpoint is None:
            # A partial replay proves nothing, and its scratch folder is removed.
            interrupt = Interrupted()
            interrupt.signal = stopped.signal
            raise interrupt from None
        return stopped.checkpoint
    return None


def _replay(result: Verification, config: TrainConfig, good: list[Checkpoint]) -> None:
    """Train again from the first checkpoint to the newest, in a scratch folder."""
    newest, first = good[0], good[-1]
    resumed = _resume_point(first) if first.step < newest.step else None
    if resumed is None and config.init_adapter is not None:
        check_initial(config.init_adapter, newest.metadata)
    with end_in_order(), scratch_folder("verify") as scratch:
        replayed = replace(
            config,
            output=str(scratch / ADAPTER),
            checkpoint_dir=str(scratch / "checkpoints"),
            quiet=True,
            # Timing the products again might change the choice of --quantized-compute auto.
            quantized_compute=recorded_products(newest.metadata) or config.quantized_compute,
            # A replay needs no tracker, profile or sample answers.
            track=(),
            profile_interval=0,
            samples=0,
        )
        if resumed is not None:
            # A replay from the start recreates this file.
            make_folder(scratch / "checkpoints")
            with suppress(OSError):  # training reports the error
                copy_file(newest.folder.parent / REFERENCE, scratch / "checkpoints" / REFERENCE)
        again = _train_again(replayed, newest, resumed)
        if again is None:
            raise OutputError(f"{result.run}: training again did not reach step {newest.step}")
        same = file_hash(again / ADAPTER) == file_hash(newest.folder / ADAPTER)
        records = list(Progress.from_jsonl(read_own(again / METRICS)))
        data = read_json(again / METADATA).get("data_hash")
        between = _differing(good, scratch / "checkpoints", newest.step)
    before = islice(Progress.from_jsonl(newest.metrics), len(records))
    start = f"trained again from step {first.step if resumed else 0} to {newest.step}"
    problem = None
    if not same or not same_except_measurements(records, before):
        problem = f"{start}: the {'metrics' if same else 'adapter'} differ{'' if same else 's'}"
        if data != newest.metadata.get("data_hash"):
            problem += ", because the data gives different examples than the run was trained on"
        elif not on_cpu():
            problem += ", perhaps by rounding: see docs/reliability.md on GPUs"
    elif between:
        problem = f"{start}: the same bytes, but not at {join_few(between)}"
    result.add("replay", problem, f"{start}: the same bytes")
