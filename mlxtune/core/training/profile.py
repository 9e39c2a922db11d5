"""Where the time and memory of a step go: what is measured, how it is kept, and how it reads.

A step is cut into phases by a clock that is read at their borders: what lies between two borders
belongs to the phase that the second one names, so that the phases and `other` add up to the step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mlxtune.core.data.encode import Example
from mlxtune.core.machine.files import as_output_error, read_own, write_file
from mlxtune.errors import OutputError

PROFILE = "profile.jsonl"
PHASES = ("data", "forward", "loss", "backward", "clip", "optimizer")
OTHER = "other"


@dataclass(frozen=True)
class Phase:
    """A phase of a step. `bytes` is what it took at most beyond what was in use as it began,
    `peak_bytes` the most that was in use at once.
    """

    seconds: float
    bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class LayerProfile:
    """A layer's two passes over all micro-batches of a step.

    `kept_bytes` is what its forward pass leaves for its backward pass, its outputs included, and
    `peak_bytes` the most that the two take; both of the micro-batch where they are largest.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    peak_bytes: int

    def plus(self, other: LayerProfile) -> LayerProfile:
        """Return the two together."""
        return LayerProfile(
            self.name,
            self.forward_seconds + other.forward_seconds,
            self.backward_seconds + other.backward_seconds,
            max(self.kept_bytes, other.kept_bytes),
            max(self.peak_bytes, other.peak_bytes),
        )


@dataclass(frozen=True)
class StepProfile:
    """One step. Its `phases`, `other` among them, add up to its `seconds`.

    `layers` come from another pass over the same micro-batches, which took `layers_seconds` after
    the step; they are empty where that was not possible.
    """

    step: int
    seconds: float
    phases: Mapping[str, Phase]
    layers: Sequence[LayerProfile] = ()
    layers_seconds: float = 0.0


@dataclass(frozen=True)
class SaveProfile:
    """A checkpoint that was written after so many steps. `bytes` is the size of its files."""

    step: int
    name: str
    seconds: float
    bytes: int


ProfileRecord = StepProfile | SaveProfile


class Laps:
    """Cuts time into phases at the borders that it is told of.

    `memory` returns the bytes in use and the most that were in use since it was last asked.
    """

    def __init__(
        self,
        memory: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._memory = memory
        self._clock = clock
        self._phases: dict[str, Phase] = {}
        self._active, _ = memory()
        self._started = self._last = clock()

    def end(self, name: str) -> None:
        """Count what came since the last border to a phase, which may come more than once."""
        now = self._clock()
        active, peak = self._memory()
        # Where nothing was allocated, no peak was counted.
        peak = max(peak, active, self._active)
        before = self._phases.get(name, Phase(0.0, 0, 0))
        self._phases[name] = Phase(
            before.seconds + now - self._last,
            max(before.bytes, peak - self._active),
            max(before.peak_bytes, peak),
        )
        self._last, self._active = now, active

    def finish(self, step: int) -> StepProfile:
        """Count the rest to `other`, and return the step."""
        self.end(OTHER)
        names = [name for name in (*PHASES, OTHER) if name in self._phases]
        phases = {name: self._phases[name] for name in names}
        return StepProfile(step, self._last - self._started, phases)


class Meter(Protocol):
    """What profiling asks of a backend."""

    def memory(self) -> tuple[int, int]:
        """Return the bytes in use, and the most that were in use since this was last asked."""

    def attach(self, laps: Laps | None) -> None:
        """Have the next steps tell of their borders; None ends that."""

    def layers(self, examples: Sequence[Example], step: int) -> list[LayerProfile]:
        """Run the micro-batches of a step once more, layer by layer; change nothing.

        Returns the layers in their order, those of no name of their own among them; none where
        there is too little memory for it.
        """


class Profiler:
    """What the trainer tells of its steps. This one measures nothing."""

    def start(self, step: int) -> None:
        """Training begins, or goes on after so many steps."""

    def begin(self, step: int) -> None:
        """A step begins."""

    def end(self, phase: str) -> None:
        """A phase of the step under way ended."""

    def finish(self) -> None:
        """The step under way was taken."""

    def abandon(self) -> None:
        """The step under way was not taken."""

    def measure_layers(self, examples: Sequence[Example]) -> None:
        """Measure the layers on the examples of the step that was taken."""

    def saving(self, step: int, folder: Path) -> AbstractContextManager[None]:
        """Within it, a checkpoint is written."""
        return nullcontext()


class StepProfiler(Profiler):
    """Profiles every so many steps, and every checkpoint.

    Writes a line of each into the run's folder; `tell` hears of each, and `warn` of what cannot be
    written, once.
    """

    def __init__(
        self,
        interval: int,
        meter: Meter,
        folder: Path,
        *,
        tell: Callable[[ProfileRecord], None],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._interval = interval
        self._meter = meter
        self._path = folder / PROFILE
        self._tell = tell
        self._warn = warn
        self._clock = clock
        self._step = 0
        self._laps: Laps | None = None
        self._found: StepProfile | None = None
        self._fails = False

    def start(self, step: int) -> None:
        """Keep what the file has of the steps up to this one; what came after is done again."""
        try:
            keep_until(self._path, step)
        except OutputError as error:
            self._failed(error)

    def begin(self, step: int) -> None:
        """Begin to measure, if it is this step's turn."""
        self._step = step
        if step % self._interval == 0:
            self._laps = Laps(self._meter.memory, self._clock)
            self._meter.attach(self._laps)

    def end(self, phase: str) -> None:
        """End a phase."""
        if self._laps is not None:
            self._laps.end(phase)

    def finish(self) -> None:
        """End the step."""
        if self._laps is not None:
            self._found = self._laps.finish(self._step)
            self.abandon()

    def abandon(self) -> None:
        """Measure no more."""
        if self._laps is not None:
            self._laps = None
            self._meter.attach(None)

    def measure_layers(self, examples: Sequence[Example]) -> None:
        """Measure the layers if it was this step's turn, and write what was found."""
        if self._found is None:
            return
        found, self._found = self._found, None
        started = self._clock()
        layers = self._meter.layers(examples, found.step)
        took = self._clock() - started
        self._write(replace(found, layers=layers, layers_seconds=took))

    @contextmanager
    def saving(self, step: int, folder: Path) -> Iterator[None]:
        """Measure the writing of a checkpoint, if it comes to its end."""
        started = self._clock()
        yield
        took = self._clock() - started
        try:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        except OSError:
            size = 0
        self._write(SaveProfile(step, folder.name, took, size))

    def _write(self, record: ProfileRecord) -> None:
        self._tell(record)
        try:
            with as_output_error(self._path), self._path.open("ab") as file:
                file.write(line_of(record))
        except OutputError as error:
            self._failed(error)

    def _failed(self, error: OutputError) -> None:
        if not self._fails:
            self._warn(f"{error}; training goes on without all of its profile")
        self._fails = True


def line_of(record: ProfileRecord) -> bytes:
    """Return the line of profile.jsonl for a record."""
    kind = "step" if isinstance(record, StepProfile) else "save"
    return (json.dumps({"kind": kind, **asdict(record)}, allow_nan=False) + "\n").encode()


def keep_until(path: Path, step: int) -> None:
    """Take from a profile what came after a step, and what is no whole line. Raises OutputError."""
    with as_output_error(path):
        try:
            lines = read_own(path).splitlines(keepends=True)
        except FileNotFoundError:
            return
        except ValueError as error:
            raise OutputError(f"{path}: {error}: move it away") from error
        kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
        if kept != lines:
            write_file(path, kept)


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity where it has none."""
    try:
        step: Any = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
