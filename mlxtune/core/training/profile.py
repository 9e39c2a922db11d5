"""Where the time and memory of a step go: the measurements, and the file that keeps them.

A timer divides a step at the boundaries of its phases: the time since the last boundary belongs to
the phase that ends there, so the phases and `other` add up to the step.
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
    """A phase of a step.

    `bytes` is its peak memory above the use at its start, `peak_bytes` the total peak.
    """

    seconds: float
    bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class LayerProfile:
    """A layer's two passes over all micro-batches of a step.

    `kept_bytes` is what the forward pass keeps for the backward pass, outputs included, and
    `peak_bytes` the peak of both passes; each for the micro-batch in which it is largest.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    peak_bytes: int

    def plus(self, other: LayerProfile) -> LayerProfile:
        """Return the sum of the times and the larger of the sizes."""
        return LayerProfile(
            self.name,
            self.forward_seconds + other.forward_seconds,
            self.backward_seconds + other.backward_seconds,
            max(self.kept_bytes, other.kept_bytes),
            max(self.peak_bytes, other.peak_bytes),
        )


@dataclass(frozen=True)
class StepProfile:
    """One step. Its `phases`, `other` included, add up to its `seconds`.

    `layers` come from a second pass over the same micro-batches, which takes `layers_seconds`
    after the step; they are empty if memory did not allow it.
    """

    step: int
    seconds: float
    phases: Mapping[str, Phase]
    layers: Sequence[LayerProfile] = ()
    layers_seconds: float = 0.0


@dataclass(frozen=True)
class SaveProfile:
    """A checkpoint written after `step` steps. `bytes` is the size of its files."""

    step: int
    name: str
    seconds: float
    bytes: int


ProfileRecord = StepProfile | SaveProfile


class PhaseTimer:
    """Divides the time and memory of a step into phases.

    `memory` returns the bytes in use and the peak since its last call.
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
        """Add everything since the last boundary to a phase, which may end more than once."""
        now = self._clock()
        active, peak = self._memory()
        # If nothing was allocated, no peak was counted.
        peak = max(peak, active, self._active)
        before = self._phases.get(name, Phase(0.0, 0, 0))
        self._phases[name] = Phase(
            before.seconds + now - self._last,
            max(before.bytes, peak - self._active),
            max(before.peak_bytes, peak),
        )
        self._last, self._active = now, active

    def finish(self, step: int) -> StepProfile:
        """Add the rest to `other`, and return the step."""
        self.end(OTHER)
        names = [name for name in (*PHASES, OTHER) if name in self._phases]
        phases = {name: self._phases[name] for name in names}
        return StepProfile(step, self._last - self._started, phases)


class ProfilerBackend(Protocol):
    """What the profiler needs from a backend."""

    def memory(self) -> tuple[int, int]:
        """Return the bytes in use, and the peak since the last call."""

    def attach(self, timer: PhaseTimer | None) -> None:
        """Report the phases of the following steps to a timer, or to none."""

    def layers(self, examples: Sequence[Example], step: int) -> list[LayerProfile]:
        """Run the micro-batches of a step again, layer by layer, without changing anything.

        Returns the layers in order, unnamed parts included; none if there is too little memory.
        """


class Profiler:
    """What the trainer reports to while it runs. This one measures nothing."""

    def start(self, step: int) -> None:
        """Start before the first step, or resume after `step` steps."""

    def step(self, step: int) -> AbstractContextManager[None]:
        """Measure the step taken inside."""
        return nullcontext()

    def end_phase(self, phase: str) -> None:
        """End a phase of the current step."""

    def measure_layers(self, examples: Sequence[Example]) -> None:
        """Measure the layers on the examples of the last step."""

    def saving(self, step: int, folder: Path) -> AbstractContextManager[None]:
        """Measure the checkpoint written inside."""
        return nullcontext()


class StepProfiler(Profiler):
    """Profiles one step in `interval`, and every checkpoint.

    Each record is passed to `on_record` and appended to a file in the run's folder; if that fails,
    `on_problem` is called once.
    """

    def __init__(
        self,
        interval: int,
        backend: ProfilerBackend,
        folder: Path,
        *,
        on_record: Callable[[ProfileRecord], None],
        on_problem: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._interval = interval
        self._backend = backend
        self._path = folder / PROFILE
        self._on_record = on_record
        self._on_problem = on_problem
        self._clock = clock
        self._timer: PhaseTimer | None = None
        self._last: StepProfile | None = None
        self._failing = False

    def start(self, step: int) -> None:
        """Keep the records up to this step; later steps are taken again."""
        try:
            truncate_profile(self._path, step)
        except OutputError as error:
            self._warn(error)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure the step taken inside, if it is due and applied."""
        if step % self._interval:
            yield
            return
        self._timer = PhaseTimer(self._backend.memory, self._clock)
        self._backend.attach(self._timer)
        try:
            yield
            self._last = self._timer.finish(step)
        finally:
            self._timer = None
            self._backend.attach(None)

    def end_phase(self, phase: str) -> None:
        """End a phase of the current step."""
        if self._timer is not None:
            self._timer.end(phase)

    def measure_layers(self, examples: Sequence[Example]) -> None:
        """Measure the layers if the last step was profiled, and write its record."""
        if self._last is None:
            return
        profile, self._last = self._last, None
        started = self._clock()
        layers = self._backend.layers(examples, profile.step)
        took = self._clock() - started
        self._write(replace(profile, layers=layers, layers_seconds=took))

    @contextmanager
    def saving(self, step: int, folder: Path) -> Iterator[None]:
        """Measure the checkpoint written inside, if it succeeds."""
        started = self._clock()
        yield
        took = self._clock() - started
        try:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        except OSError:
            size = 0
        self._write(SaveProfile(step, folder.name, took, size))

    def _write(self, record: ProfileRecord) -> None:
        self._on_record(record)
        kind = "step" if isinstance(record, StepProfile) else "save"
        line = json.dumps({"kind": kind, **asdict(record)}, allow_nan=False) + "\n"
        try:
            with as_output_error(self._path), self._path.open("ab") as file:
                file.write(line.encode())
        except OutputError as error:
            self._warn(error)

    def _warn(self, error: OutputError) -> None:
        if not self._failing:
            self._on_problem(f"{error}; training continues, and its profile will be incomplete")
        self._failing = True


def truncate_profile(path: Path, step: int) -> None:
    """Remove later steps and broken lines from a profile. Raises OutputError."""
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
    """Return the step of a line; infinity if it has none."""
    try:
        step: Any = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
