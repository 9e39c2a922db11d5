"""The folder of a run: where a run resumes, and how a new run replaces an earlier one.

The process that trains in the folder holds `.mlxtune.lock`.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.files.lock import Lock, LockHeldError, NoLocksError, holder_of
from mlxtune.core.files.ours import (
    discard,
    entries,
    is_empty,
    is_folder,
    is_ours,
    is_shallow,
    move,
    remove_file,
)
from mlxtune.core.files.remembered import MARK, is_own, mark
from mlxtune.core.files.writing import as_output_error, make_folder, write_file
from mlxtune.core.formatting import join_few
from mlxtune.core.run.checkpoint import (
    ADAPTER,
    BEST,
    METRICS,
    Checkpoint,
    checkpoint_folders,
    find_checkpoints,
    is_checkpoint,
    is_named_checkpoint,
    restore_interrupted_best,
)
from mlxtune.core.run.profile import PROFILE
from mlxtune.core.run.progress import Progress
from mlxtune.errors import OutputError

ABOUT = "run.json"
LEDGER = "ledger.json"
RESULT = "result.json"
EVALUATION = "evaluation.json"
# The key in result.json of the SHA-256 of evaluation.json, once that file is complete.
EVALUATION_HASH = "evaluation_sha256"
TRAINED_ROWS = "trained_rows.bin"
# The files that a run writes before its first step. Checkpoints have their hashes, but a run that
# resumes writes them again: its run.json then has the step under the key RESUMED.
BEFORE_STEPS = (LEDGER, ABOUT, TRAINED_ROWS)
RESUMED = "resumed"
# The keys of run.json, once a run that learns from rewards has resumed: the folder in which it was
# started, and the names that its records have for its data files, in the order of the ledger.
STARTED_IN, ROW_FILES = "started_in", "row_files"
# The other keys of run.json and result.json, apart from those that not every run has.
ABOUT_KEYS = (
    *("format", "started_at", "device", "model", "lora", "template", "plan", "lengths"),
    *("data_hash", "validation_hash", "hub", "versions", "config", "auto"),
)
RESULT_KEYS = (
    *("steps", "epochs", "stopped_early", "train_loss", "initial_val_loss"),
    *("best_epoch", "best_step", "best_val_loss", "total_time_ms", "peak_memory"),
    *("adapter", "sha256"),
)
REPORT = "report.html"
# The answers generated after the last validation, with --open.
LIVE_ANSWERS = "samples.json"
# The name of an earlier run's folder. The newest earlier run has the highest number; old versions
# of mlxtune wrote no number.
_PREVIOUS_NAME = re.compile(r"previous(?:-([1-9]\d{0,8}))?")
_MOVING_NAME = ".previous.moving"
LOCK = ".mlxtune.lock"
# A file that asks the process training in the folder to stop after its step, and to save.
STOP = ".mlxtune.stop"
# The reference's log-probabilities, under a preference objective.
REFERENCE = "reference.json"
# LoRA's values in the reference, before the first step, if the loss has the divergence from it.
REFERENCE_LORA = "initial.safetensors"
# Sampled answers with their rewards, for an objective that learns from rewards.
SAMPLE_RECORDS = "samples.jsonl.gz"
# The run's identity with each tracker, and folders in which trackers keep their files.
TRACKING = "tracking.json"
TENSORBOARD = "tensorboard"
_RUN_FILES = (
    *(METRICS, ABOUT, LEDGER, TRAINED_ROWS, REFERENCE, REFERENCE_LORA, SAMPLE_RECORDS),
    *(RESULT, EVALUATION, REPORT, PROFILE, LIVE_ANSWERS),
)
# TRACKING shows that folders of these names belong to the run, so it is moved last.
_TRACKERS = (TENSORBOARD, "wandb")
_FILES = {*_RUN_FILES, TRACKING, MARK, LOCK, STOP}


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from.

    `kept` are the numbered checkpoints up to this one, the oldest first; `skipped` says why newer
    checkpoints are unusable.
    """

    checkpoint: Checkpoint
    progress: Progress
    kept: Sequence[Path]
    skipped: Mapping[Path, str]


def find_resume_point(run: Path) -> ResumePoint | None:
    """Return the newest checkpoint to resume from; None if the folder has none.

    The checkpoint must be valid, and so must `best/` if an earlier validation was the best so far.

    Raises OutputError when there are checkpoints but none is usable.
    """
    if is_checkpoint(run / f".{BEST}.old") and not os.path.lexists(run / BEST):
        # Locking restores `best/`. Another process that holds the lock is still replacing it.
        with suppress(OutputError):
            lock_run(run).release()
    good, skipped = find_checkpoints(run)
    for checkpoint in good:
        try:
            progress = Progress.from_jsonl(checkpoint.metrics)
            if progress.step != checkpoint.step:
                raise ValueError(f"its metrics end at step {progress.step}, not {checkpoint.step}")
            if not _has_best(progress, good):
                raise ValueError(f"{BEST}/, of an earlier step, is missing or damaged")
        except (OSError, ValueError) as problem:
            skipped[checkpoint.folder] = str(problem)
        else:
            numbered = [each for each in reversed(good) if each.folder.name != BEST]
            earlier = [each.folder for each in numbered if each.step <= checkpoint.step]
            return ResumePoint(checkpoint, progress, earlier, skipped)
    if skipped:
        why = "; ".join(f"{folder.name}: {reason}" for folder, reason in sorted(skipped.items()))
        raise OutputError(
            f"{run}: none of its checkpoints can be used: {why}: "
            "start over with mlxtune train --overwrite"
        )
    return None


def _has_best(progress: Progress, good: list[Checkpoint]) -> bool:
    best = progress.best
    if best is None or best.step == progress.step:
        return True
    saved = (checkpoint.metadata for checkpoint in good if checkpoint.folder.name == BEST)
    return any((each["step"], each.get("val_loss")) == (best.step, best.val_loss) for each in saved)


def is_unfinished(run: Path) -> bool:
    """Return whether a folder holds a run that has checkpoints but did not finish."""
    return bool(checkpoint_folders(run)) and not (run / RESULT).exists()


def reopen(run: Path) -> None:
    """Remove the files that a finished run wrote last, before it resumes. Raises OutputError."""
    for name in (RESULT, EVALUATION):
        with as_output_error(run / name):
            remove_file(run / name)
    # A stale report does no harm.
    with suppress(OSError):
        remove_file(run / REPORT)


def lock_run(run: Path, *, new: bool = False) -> Lock:
    """Lock a run's folder, created if missing, for the lifetime of this process.

    From then on, this process writes there only while the folder is in place (`check_not_moved`).
    Raises OutputError if another process trains there, if the run would change files of other
    programs (see `check_own`), or if the folder cannot be written.
    """
    with as_output_error(run, "--checkpoint-dir"):
        try:
            if (holder := holder_of(run / LOCK)) is not None:
                raise LockHeldError(holder)
            check_own(run, new=new)
            make_folder(run, "--checkpoint-dir")
            lock = Lock(run / LOCK, guards=True)
        except LockHeldError as held:
            raise _in_use_error(run, held, "--checkpoint-dir") from held
        except NoLocksError as error:
            raise OutputError(
                f"{run} cannot be locked against other runs: {error.strerror}: choose a "
                "--checkpoint-dir on a local disk"
            ) from error
        # An unanswered request to stop was for the previous run.
        remove_file(run / STOP)
        restore_interrupted_best(run)
        return lock


def request_stop(run: Path) -> None:
    """Ask the process that trains in a folder to stop after its step, and to save.

    Raises OutputError if no process trains there, or the folder cannot be written.
    """
    if holder_of(run / LOCK) is None:
        raise OutputError(f"{run}: no process is training here: there is nothing to stop")
    write_file(run / STOP, [])


class StopRequest:
    """Checks whether another process asked the run in a folder to stop; calls `notify` once."""

    def __init__(self, run: Path, notify: Callable[[], None]) -> None:
        self._path, self._notify = run / STOP, notify
        self._received = False

    def __call__(self) -> bool:
        if not self._received and is_ours(self._path):
            self._received = True
            with suppress(OSError):  # the next run removes it
                remove_file(self._path)
            self._notify()
        return self._received


def lock_output(adapter: Path) -> Lock | None:
    """Lock a run's adapter for the lifetime of this process; None if the file system has no locks.

    Raises OutputError when another run has locked it, or its folder cannot be written.
    """
    with as_output_error(adapter, "--output"):
        make_folder(adapter.parent, "--output")
        try:
            return Lock(adapter.with_name(f".{adapter.name}{LOCK}"))
        except LockHeldError as held:
            raise _in_use_error(adapter, held, "--output") from held
        except NoLocksError:
            return None


def _in_use_error(path: Path, held: LockHeldError, option: str) -> OutputError:
    pid = held.holder.get("pid")
    who = "another process" if pid is None else f"process {pid}"
    return OutputError(
        f"{path}: {who} is training here: wait until it ends, or choose another {option}"
    )


def check_own(run: Path, *, new: bool = True) -> None:
    """Raise OutputError if a run would change files of other programs in its folder.

    A `new` run moves or replaces all files of an earlier run; a resumed run replaces only some.
    """
    if not run.is_dir():
        return
    with as_output_error(run, "--checkpoint-dir"):
        paths = entries(run)
        files = [path for path in paths if path.name in _FILES]
        strange = [path for path in files if not is_ours(path)]
        if new:
            if not is_ours(run / MARK):
                strange += [path for path in files if path.name not in (MARK, LOCK)]
            strange += [path for path in paths if is_named_checkpoint(path) and _is_strange(path)]
            moving = run / _MOVING_NAME
            strange += [moving] if os.path.lexists(moving) and not _is_run(moving) else []
    if strange:
        names = join_few(sorted({path.name for path in strange}))
        raise OutputError(
            f"{run} holds {names}, not written by mlxtune: move it away, or choose another "
            "--checkpoint-dir"
        )


def _is_strange(folder: Path) -> bool:
    return not is_checkpoint(folder) and not is_empty(folder)


def _is_run(folder: Path) -> bool:
    """Return whether a folder holds only files of an earlier run, or no files."""
    if not is_folder(folder):
        return False
    paths = entries(folder)
    return not paths or (is_ours(folder / MARK) and all(map(_is_of_a_run, paths)))


def _is_of_a_run(path: Path) -> bool:
    if is_named_checkpoint(path):
        return not _is_strange(path)
    if path.name in _TRACKERS:
        # Trackers choose the names of their files.
        return is_folder(path) and is_shallow(path)
    return path.name in _FILES and is_ours(path)


def check_outside(output: Path, run: Path) -> None:
    """Raise OutputError if an adapter would be written into a run other than `run`."""
    folder = output.parent.resolve()
    for parent in (folder, *folder.parents):
        if is_ours(parent / MARK) and parent != run.resolve():
            raise OutputError(f"{output} is within the run in {parent}: choose another --output")


def adapters_in(run: Path) -> Iterator[Path]:
    """Yield the adapters in the checkpoints of a run, and of earlier runs in its folder."""
    paths = entries(run) if is_folder(run) else []
    for folder in (run, *(path for path in paths if previous_number(path.name) is not None)):
        yield from (checkpoint / ADAPTER for checkpoint in checkpoint_folders(folder))


def previous_number(name: str) -> int | None:
    """Return an earlier run's number from its folder's name; None for any other name."""
    match = _PREVIOUS_NAME.fullmatch(name)
    return int(match[1] or 0) if match else None


def archive_previous_run(run: Path) -> Path | None:
    """Move an earlier run's files into a new folder `previous-N/`; mark `run` for a new run.

    If this call is interrupted, the next call completes the move. Returns `previous-N/`, or None
    when the folder holds no run. Raises OutputError if the move fails, or if files of other
    programs are in the way.
    """
    check_own(run)
    moving = run / _MOVING_NAME
    make_folder(run)
    with as_output_error(moving):
        paths = sorted(run.iterdir())
        earlier = [path for path in paths if is_named_checkpoint(path)]
        earlier += [run / name for name in _RUN_FILES if os.path.lexists(run / name)]
        if os.path.lexists(run / TRACKING):
            names = (*_TRACKERS, TRACKING)
            earlier += [run / name for name in names if os.path.lexists(run / name)]
        if not earlier and not is_folder(moving):
            mark(run)
            return None
        make_folder(moving)
        if is_own(run):
            mark(moving)
        else:
            write_file(moving / MARK, [])
        for path in earlier:
            # A run that resumed after an interrupted move has made some files again.
            if path.name in _FILES:
                remove_file(moving / path.name)
            move(path, moving / path.name)
        if not checkpoint_folders(moving) and not os.path.lexists(moving / METRICS):
            # The run was stopped before its first record.
            discard(moving)
            mark(run)
            return None
        number = max(previous_number(path.name) or 0 for path in [moving, *paths]) + 1
        previous = run / f"previous-{number}"
        move(moving, previous)
        mark(run)
    return previous


def discard_unstarted(run: Path) -> None:
    """Remove the files of this process's run, which ended before its first step."""
    with as_output_error(run):
        if (moved := archive_previous_run(run)) is not None:
            discard(moved)
        if not any(previous_number(path.name) is not None for path in entries(run)):
            remove_file(run / MARK)


def discard_empty(folder: Path) -> None:
    """Remove a folder if it is empty, and ignore errors."""
    with suppress(OSError):
        if is_empty(folder):
            discard(folder)


def remove_run(run: Path) -> None:
    """Remove a run's files, apart from its adapter and the earlier runs in its folder.

    Raises OutputError, and removes nothing, if a process trains there, or if the folder contains
    files of other programs.
    """
    lock = lock_run(run, new=True)
    try:
        moved = archive_previous_run(run)
        with as_output_error(run):
            if moved is not None:
                discard(moved)
            remove_file(run / MARK)
    finally:
        lock.release()
    discard_empty(run)
