"""When a run writes checkpoints, which checkpoints it keeps, and how it handles a failing disk."""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from mlxtune.core.files.ours import replace_file
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.files.writing import BestEffort, as_output_error, make_folder
from mlxtune.core.formatting import byte_size
from mlxtune.core.run import checkpoint
from mlxtune.errors import OutputError

# After a failed save, the next attempt is at the next regular save or after this many seconds.
_RETRY_SECONDS = 60.0

# A captured state of a pipeline; a call with a folder, now or later, writes the state into the
# folder.
Snapshot = Callable[[Path], None]


@dataclass(frozen=True)
class CheckpointContent:
    """The contents of a checkpoint. `metrics` returns the lines of its metrics.jsonl."""

    snapshot: Snapshot
    metadata: Mapping[str, Any]
    metrics: Callable[[], Iterable[bytes]]


def write_adapter_of(snapshot: Snapshot, output: Path) -> None:
    """Write only the adapter of a state, and its config. Raises OutputError."""
    make_folder(output.parent)
    with as_output_error(output, "--output"), scratch_folder(parent=output.parent) as folder:
        try:
            snapshot(folder)
        except OutputError:
            # The adapter comes first, and may fit where the optimizer does not.
            if not (folder / checkpoint.ADAPTER_CONFIG).exists():
                raise
        config = output.with_name(checkpoint.ADAPTER_CONFIG)
        replace_file(folder / checkpoint.ADAPTER, output)
        replace_file(folder / checkpoint.ADAPTER_CONFIG, config)


def free_space(folder: Path) -> int | None:
    """Return the free bytes on a folder's disk; None if its file system does not count them.

    The folder may not exist yet. Raises OutputError.
    """
    with as_output_error(folder, "--checkpoint-dir"):
        existing = next(
            parent for parent in (folder, *folder.absolute().parents) if parent.exists()
        )
        usage = shutil.disk_usage(existing)
    return usage.free if usage.total else None


def check_space(folder: Path, size: int) -> None:
    """Raise OutputError unless a checkpoint of this size fits on a folder's disk."""
    free = free_space(folder)
    if free is not None and free < size:
        raise OutputError(
            f"{folder} cannot be written: a checkpoint takes {byte_size(size)}, and "
            f"{byte_size(free)} are free: free space or choose another --checkpoint-dir"
        )


@dataclass
class CheckpointSaver:
    """Writes the checkpoints of a run.

    A checkpoint within an epoch is due after `every_steps` steps or `every_minutes` minutes,
    whichever comes first, and at the end of an epoch every `every_epochs` of the run's `epochs`, or
    always in a shorter run. The last `keep` checkpoints remain, in addition to `best/`.
    """

    folder: Path
    _: KW_ONLY
    every_steps: int | None
    every_minutes: float
    epochs: int
    every_epochs: int
    keep: int
    on_saved: Callable[[Path], None]
    on_problem: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.latest: Path | None = None
        self._kept: list[Path] = []
        self._best_effort = BestEffort(self.on_problem, "the next save will try again")
        self._saved_at, self._saved_step = self.clock(), 0
        # The content of `best/`, until it can be written.
        self.pending_best: CheckpointContent | None = None

    def resume(self, latest: Path, folders: Sequence[Path], step: int) -> None:
        """Continue from the `latest` checkpoint, after `step` steps.

        `folders` are the numbered checkpoints kept so far, the oldest first.
        """
        self.latest, self._kept, self._saved_step = latest, list(folders), step

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step within an epoch, on every worker."""
        return self.every_steps is not None and step - self._saved_step >= self.every_steps

    def is_due_at_end(self, epoch: int) -> bool:
        """Return whether a checkpoint is due at the end of an epoch, on every worker."""
        return self.epochs <= self.every_epochs or epoch % self.every_epochs == 0

    def asks_for_save(self, step: int, *, halved: bool) -> bool:
        """Return whether this worker asks the others for a checkpoint that they don't know is due.

        After `halved` micro-batches, a run must resume with the same size.
        """
        elapsed = self.clock() - self._saved_at
        retries = self._best_effort.failing and elapsed >= _RETRY_SECONDS
        own = halved or retries or 0 < self.every_minutes * 60 <= elapsed
        return own and not self.is_due(step)

    def try_save(self, name: str, content: CheckpointContent) -> None:
        """Write a checkpoint, and prune older ones; if that fails, warn and let training continue.

        Progress is lost only if the run ends before the disk works again.
        """
        with self._best_effort.attempt():
            self.save(name, content)

    def save(self, name: str, content: CheckpointContent) -> Path:
        """Write a checkpoint, and prune older ones. Raises OutputError."""
        self._saved_step, self._saved_at = content.metadata["step"], self.clock()
        # Without `best/`, a run cannot resume from a checkpoint later than the best step.
        self._save_pending_best()
        target = self._write(name, content)
        self._kept = [*(path for path in self._kept if path != target), target][-self.keep :]
        checkpoint.prune(self.folder, set(self._kept))
        return target

    def save_best(self, content: CheckpointContent) -> None:
        """Write `best/`, or leave it to the next save if it cannot be written now."""
        self.pending_best = content
        with self._best_effort.attempt():
            self._save_pending_best()

    def finish(self) -> None:
        """Write `best/` if it is still pending, and remove old checkpoints. Raises OutputError."""
        self._save_pending_best()
        if self._kept:
            checkpoint.prune(self.folder, set(self._kept[-self.keep :]))

    def _save_pending_best(self) -> None:
        if self.pending_best is not None:
            self._write(checkpoint.BEST, self.pending_best)
            self.pending_best = None

    def _write(self, name: str, content: CheckpointContent) -> Path:
        target = self.folder / name
        checkpoint.write_checkpoint(target, content.snapshot, content.metadata, content.metrics())
        self.latest = target
        self.on_saved(target)
        return target
