"""The folder of a run: where to resume, and how a new run replaces it.

`core/runs/run_files.py` lists its files. The process that trains there holds `.lock`.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.machine.files import as_output_error
from mlxtune.core.machine.lock import Held, Lock
from mlxtune.core.training.checkpoint import (
    BEST,
    METRICS,
    Checkpoint,
    checkpoint_folders,
    find_checkpoints,
)
from mlxtune.core.training.profile import PROFILE
from mlxtune.core.training.progress import Progress
from mlxtune.errors import OutputError

ABOUT = "run.json"
LEDGER = "ledger.json"
RESULT = "result.json"
EVALUATION = "evaluation.json"
REPORT = "report.html"
PREVIOUS = "previous"
LOCK = ".lock"
# The run's identity with each tracker, and the files of trackers that keep them here.
TRACKING = "tracking.json"
TENSORBOARD = "tensorboard"
_OF_A_RUN = (
    *("epoch-*", "step-*", BEST, METRICS, ABOUT, LEDGER, RESULT, EVALUATION, REPORT),
    PROFILE,
)
# TRACKING shows that folders of these names belong to the run, so it is moved last.
_OF_TRACKERS = (TENSORBOARD, "wandb", TRACKING)


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from.

    `kept` are the numbered checkpoints up to this one, the oldest first; `skipped` says why newer
    ones are unusable.
    """

    checkpoint: Checkpoint
    progress: Progress
    kept: Sequence[Path]
    skipped: Mapping[Path, str]


def find_resume_point(run: Path) -> ResumePoint | None:
    """Return the newest checkpoint to resume from; None if the folder has none.

    It must be valid, and so must `best/` if an earlier epoch is the best so far.

    Raises OutputError when there are checkpoints but none is usable.
    """
    good, skipped = find_checkpoints(run)
    for checkpoint in good:
        try:
            progress = Progress.from_jsonl(checkpoint.metrics)
            if progress.step != checkpoint.step:
                raise ValueError(f"its metrics end at step {progress.step}, not {checkpoint.step}")
            if not _has_best(progress, good):
                raise ValueError(f"{BEST}/, of an earlier epoch, is missing or damaged")
        except (OSError, ValueError) as problem:
            skipped[checkpoint.folder] = str(problem)
        else:
            numbered = [each for each in reversed(good) if each.folder.name != BEST]
            kept = [each.folder for each in numbered if each.step <= checkpoint.step]
            return ResumePoint(checkpoint, progress, kept, skipped)
    if skipped:
        why = "; ".join(f"{folder.name}: {reason}" for folder, reason in sorted(skipped.items()))
        raise OutputError(
            f"{run}: none of its checkpoints can be used: {why}: "
            "start over with mlxtune train --overwrite"
        )
    return None


def _has_best(progress: Progress, good: list[Checkpoint]) -> bool:
    best = progress.best
    if best is None or progress[-1] == best:
        return True
    saved = (each.metadata for each in good if each.folder.name == BEST)
    return any(
        (each.get("epoch"), each.get("val_loss")) == (best.epoch, best.val_loss) for each in saved
    )


def is_unfinished(run: Path) -> bool:
    """Return whether a folder holds a run that has checkpoints but did not end."""
    return bool(checkpoint_folders(run)) and not (run / RESULT).exists()


def reopen(run: Path) -> None:
    """Remove the files of a run's end before it resumes. Raises OutputError."""
    for name in (RESULT, EVALUATION):
        with as_output_error(run / name):
            (run / name).unlink(missing_ok=True)
    # A stale report does no harm.
    with suppress(OSError):
        (run / REPORT).unlink()


def lock_run(run: Path) -> Lock:
    """Lock a run's folder, created if missing, for the lifetime of this process.

    Raises OutputError when another process trains there, or the folder cannot be written.
    """
    with as_output_error(run, "--checkpoint-dir"):
        run.mkdir(parents=True, exist_ok=True)
        try:
            return Lock(run / LOCK)
        except Held as held:
            raise OutputError(
                f"{run}: process {held.holder.get('pid', 'of another user')} is training here: "
                "wait until it ends, or choose another --checkpoint-dir"
            ) from held


def archive_previous_run(run: Path) -> Path | None:
    """Move an earlier run's files into `previous/`, replacing its content.

    If interrupted, the next call completes the move.

    Returns `previous/`, or None when the folder holds no run. Raises OutputError.
    """
    previous = run / PREVIOUS
    moving = run / f".{PREVIOUS}.tmp"
    earlier = sorted(path for pattern in _OF_A_RUN for path in run.glob(pattern))
    if (run / TRACKING).exists():
        earlier += [run / name for name in _OF_TRACKERS if (run / name).exists()]
    if not earlier and not moving.is_dir():
        return None
    with as_output_error(previous):
        if previous.exists() and not previous.is_dir():
            raise OutputError(f"{previous}: is a file: move it away")
        moving.mkdir(exist_ok=True)
        for path in earlier:
            path.rename(moving / path.name)
        if previous.exists():
            shutil.rmtree(previous)
        moving.rename(previous)
    return previous
