"""When a run saves, what it does where it cannot, and which checkpoints it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from mlxtune.core.machine.files import write_json
from mlxtune.core.training import checkpoint
from mlxtune.errors import OutputError

# After a save that failed, the next is tried when it is due, or after so many seconds.
_RETRY_SECONDS = 60.0

# Writes what a pipeline was when it was made, into a folder.
Snapshot = Callable[[Path], None]
# Gives the lines of metrics.jsonl as they were when it was made.
Lines = Callable[[], Iterable[bytes]]


class Saver:
    """Writes the checkpoints of a run.

    `every_steps` and `every_minutes` say when one is due between the ends of epochs; `keep` how
    many remain beside `best/`. `records` are JSON values that each checkpoint holds, by file name.
    `on_saved` hears of each that was written, `tell` of what could not be; each is written within
    `saving(step, folder)`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every_steps: int | None,
        every_minutes: float,
        keep: int,
        on_saved: Callable[[Path], None],
        tell: Callable[[str], None],
        saving: Callable[[int, Path], AbstractContextManager[None]] = lambda *_: nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.records: Mapping[str, Any] = {}
        self.latest: Path | None = None
        self._every_steps = every_steps
        self._every_seconds = every_minutes * 60
        self._keep = keep
        self._on_saved = on_saved
        self._tell = tell
        self._saving = saving
        self._clock = clock
        self._kept: list[Path] = []
        self._failing = False
        self._at, self._step = clock(), 0
        # The best epoch's, where the disk did not take it yet.
        self._pending_best: Callable[[], Path] | None = None

    def go_on_from(self, kept: list[Path], step: int) -> None:
        """Go on with these checkpoints, the oldest first, after so many steps."""
        self._kept, self._step = list(kept), step
        self.latest = kept[-1] if kept else None

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint is to be written after so many steps."""
        passed = self._clock() - self._at
        if self._failing and passed >= _RETRY_SECONDS:
            return True
        by_steps = self._every_steps is not None and step - self._step >= self._every_steps
        return by_steps or 0 < self._every_seconds <= passed

    def save(
        self, name: str, snapshot: Snapshot, metadata: Mapping[str, Any], metrics: Lines
    ) -> None:
        """Write a checkpoint and remove older ones. Where it cannot be written, that is told.

        The run goes on then: what it knows is lost only if it ends before the disk is mended.
        """
        self._try(lambda: self.save_now(name, snapshot, metadata, metrics))

    def save_now(
        self, name: str, snapshot: Snapshot, metadata: Mapping[str, Any], metrics: Lines
    ) -> Path:
        """Write a checkpoint and remove older ones. Raises OutputError where it cannot be."""
        self._step, self._at = metadata["step"], self._clock()
        # What comes after the best epoch is of no use without it.
        self.save_pending()
        target = self._write(name, snapshot, metadata, metrics)
        self._kept = [*(path for path in self._kept if path != target), target][-self._keep :]
        checkpoint.prune(self.folder, set(self._kept))
        return target

    def save_best(self, snapshot: Snapshot, metadata: Mapping[str, Any], metrics: Lines) -> None:
        """Write `best/`, at the next chance where it cannot be written now."""
        self._pending_best = lambda: self._write(checkpoint.BEST, snapshot, metadata, metrics)
        self._try(self.save_pending)

    def save_pending(self) -> None:
        """Write `best/` if that is still to be done. Raises OutputError."""
        if self._pending_best is not None:
            self._pending_best()
            self._pending_best = None

    def finish(self) -> None:
        """Do what is still to be done at the end of the run. Raises OutputError."""
        self.save_pending()
        if self._kept:
            checkpoint.prune(self.folder, set(self._kept[-self._keep :]))

    def _write(
        self, name: str, snapshot: Snapshot, metadata: Mapping[str, Any], metrics: Lines
    ) -> Path:
        def fill(folder: Path) -> None:
            snapshot(folder)
            for file, record in self.records.items():
                write_json(folder / file, record)

        target = self.folder / name
        with self._saving(metadata["step"], target):
            checkpoint.write_checkpoint(target, fill, metadata, metrics())
        self.latest, self._failing = target, False
        self._on_saved(target)
        return target

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OutputError as error:
            if not self._failing:
                self._tell(f"{error}; training goes on and tries again")
            self._failing = True
