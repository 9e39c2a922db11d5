"""The folder of a run: what lies in it, whether it can be gone on with, and how it gives way.

checkpoints/
run.json                       what the run is: its options, model, plan and data
metrics.jsonl  ledger.json     what the run said so far, and where its rows went
profile.jsonl                  where the time of its steps went, if that was asked for
best/  epoch-2/  step-40/      checkpoints
result.json                    how the run ended, once it has
tracking.json  tensorboard/  wandb/  what trackers know the run by, and their files
evaluation.json                whether its adapter helped on the validation rows
report.html                    a page of all that
previous/                      the same of the run before
.lock                          held by the process that trains here
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxtune.core.machine.files import as_output_error, read_json, write_json
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
# What the run is known by to each tracker, and the files of those that keep theirs here.
TRACKING = "tracking.json"
TENSORBOARD = "tensorboard"
_OF_A_RUN = (
    *("epoch-*", "step-*", BEST, METRICS, ABOUT, LEDGER, RESULT, EVALUATION, REPORT),
    PROFILE,
)
# The last tells them from folders of those names that are not ours, and is moved last.
_OF_TRACKERS = (TENSORBOARD, "wandb", TRACKING)


@dataclass(frozen=True)
class Resumable:
    """A checkpoint to go on from, and where the run stood.

    `good` are all that check, the newest first; `skipped` says why newer ones do not serve.
    """

    checkpoint: Checkpoint
    progress: Progress
    good: list[Checkpoint]
    skipped: Mapping[Path, str]

    @property
    def kept(self) -> list[Path]:
        """The numbered checkpoints up to this one, the oldest first."""
        step = self.checkpoint.step
        found = [each.folder for each in reversed(self.good) if each.step <= step]
        return [folder for folder in found if folder.name != BEST]

    @property
    def names(self) -> set[str]:
        """The names of the checkpoints that were written at the same moment."""
        mine = self.checkpoint.metrics
        return {each.folder.name for each in self.good if each.metrics == mine}


def find_resumable(run: Path) -> Resumable | None:
    """Return the newest checkpoint of a run that can be gone on from; None where there is none.

    It has to check, and so has the best one before it, which may be what the run gives in the end.

    Raises OutputError when there are some and none of them serves.
    """
    good, skipped = find_checkpoints(run)
    for each in good:
        try:
            progress = Progress.from_jsonl(each.metrics)
            if progress.step != each.step:
                raise ValueError(f"its metrics end at step {progress.step}, not {each.step}")
            if not _has_best(progress, good):
                raise ValueError(f"{BEST}/, of an epoch before it, is gone or damaged")
        except (OSError, ValueError) as problem:
            skipped[each.folder] = str(problem)
        else:
            return Resumable(each, progress, good, skipped)
    if skipped:
        why = "; ".join(f"{folder.name}: {reason}" for folder, reason in sorted(skipped.items()))
        raise OutputError(
            f"{run}: none of its checkpoints can be used: {why}: "
            "start over with mlxtune train --overwrite"
        )
    return None


def _has_best(progress: Progress, good: list[Checkpoint]) -> bool:
    best = progress.best
    if best is None or progress.records[-1] == best:
        return True
    mine = (best.epoch, best.val_loss)
    found = (each.metadata for each in good if each.folder.name == BEST)
    return any((each.get("epoch"), each.get("val_loss")) == mine for each in found)


def unfinished(run: Path) -> bool:
    """Tell whether a folder holds a run that can be gone on with and did not come to its end."""
    return bool(checkpoint_folders(run)) and not (run / RESULT).exists()


def reopen(run: Path) -> None:
    """Have a run that may have ended go on. Raises OutputError."""
    for name in (RESULT, EVALUATION):
        with as_output_error(run / name):
            (run / name).unlink(missing_ok=True)
    # It says that the run ended; that it stays where it cannot be removed costs nothing.
    with suppress(OSError):
        (run / REPORT).unlink()


def write_result(run: Path, result: Mapping[str, Any]) -> None:
    """Say that the run came to its end, and how. Raises OutputError."""
    write_json(run / RESULT, result)


def read_result(run: Path) -> dict[str, Any] | None:
    """Return how a run ended; None where it did not. Raises ValueError where it cannot be read."""
    try:
        return read_json(run / RESULT)
    except OSError:
        return None


def lock(run: Path) -> Lock:
    """Lock a run's folder, which is made where it is missing, for as long as this process lives.

    Raises OutputError when another process trains there, or the folder cannot be written.
    """
    with as_output_error(run, "--checkpoint-dir"):
        run.mkdir(parents=True, exist_ok=True)
        try:
            return Lock(run / LOCK)
        except Held as held:
            raise OutputError(
                f"{run}: process {held.holder.get('pid', 'of another user')} is training here: "
                "wait for its end, or choose another --checkpoint-dir"
            ) from held


def set_previous_aside(run: Path) -> Path | None:
    """Move an earlier run's files into `previous/`, in place of what that held.

    What is there goes only when all has been moved; stopped halfway, the next call goes on.

    Returns `previous/`, or None when the folder holds no run. Raises OutputError.
    """
    previous = run / PREVIOUS
    moving, replaced = (run / f".{PREVIOUS}.{state}" for state in ("tmp", "old"))
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
        shutil.rmtree(replaced, ignore_errors=True)
        if previous.exists():
            previous.rename(replaced)
        moving.rename(previous)
        shutil.rmtree(replaced, ignore_errors=True)
    return previous
