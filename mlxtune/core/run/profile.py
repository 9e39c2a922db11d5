"""The time and memory of a step by phase: the measurements, and the file that keeps them.

A timer divides a step at the boundaries of its phases: the time since the last boundary belongs to
the phase that ends there, so the phases and `other` add up to the step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Protocol

from mlxtune.core.files.writing import BestEffort, append_line

PROFILE = "profile.jsonl"
PHASES = ("data", "forward", "loss", "backward", "optimizer")
OTHER = "other"


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    `bytes` is the peak memory minus the memory in use at the start, and `peak_bytes` the total
    peak.
    """

    seconds: float
    bytes: int
    peak_bytes: int

    def plus(self, other: Phase) -> Phase:
        return Phase(
            self.seconds + other.seconds,
            max(self.bytes, other.bytes),
            max(self.peak_bytes, other.peak_bytes),
        )


@dataclass(frozen=True)
class StepProfile:
    """The profile of one step. Its `phases`, `other` included, add up to its `seconds`."""

    step: int
    seconds: float
    phases: Mapping[str, Phase]


@dataclass
class PhaseTimer:
    """Divides the time and memory of a step into phases.

    `memory` returns the number of bytes in use, and the peak since its last call.
    """

    memory: Callable[[], tuple[int, int]]
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._phases: dict[str, Phase] = {}
        self._active, _ = self.memory()
        self._started = self._last = self.clock()

    def end(self, name: str) -> None:
        """Add the time and memory since the last boundary to a phase, which may end repeatedly."""
        now = self.clock()
        active, peak = self.memory()
        # If nothing was allocated, the reported peak is too low.
        peak = max(peak, active, self._active)
        stretch = Phase(now - self._last, peak - self._active, peak)
        before = self._phases.get(name)
        self._phases[name] = before.plus(stretch) if before else stretch
        self._last, self._active = now, active

    def finish(self, step: int) -> StepProfile:
        """Add the remaining time and memory to `other`, and return the step's profile."""
        self.end(OTHER)
        return StepProfile(step, self._last - self._started, self._phases)


class ProfilerBackend(Protocol):
    """The backend's interface for the profiler.

    The backend reports the phases of a step to its `timer`, if one is set.
    """

    timer: PhaseTimer | None

    def memory(self) -> tuple[int, int]:
        """Return the number of bytes in use, and the peak since the last call."""


@dataclass
class StepProfiler:
    """Profiles every `interval`-th step.

    Each record is passed to `on_record` and appended to a file in the run's folder; `on_problem`
    gets the first failed write in a row. Steps that a resumed run repeats are appended again.
    """

    interval: int
    backend: ProfilerBackend
    folder: Path
    _: KW_ONLY
    on_record: Callable[[StepProfile], None]
    on_problem: Callable[[str], None]
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._last: StepProfile | None = None
        self._best_effort = BestEffort(self.on_problem, "its profile will be incomplete")

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure the step taken in the block, if the step is due and succeeds."""
        if step % self.interval:
            yield
            return
        timer = PhaseTimer(self.backend.memory, self.clock)
        self.backend.timer = timer
        try:
            yield
            self._last = timer.finish(step)
        finally:
            self.backend.timer = None

    def discard(self) -> None:
        """Forget the last step, which changed nothing, so that it has no record."""
        self._last = None

    def record(self) -> None:
        """Write the record of the last step, if it was profiled."""
        if self._last is None:
            return
        profile, self._last = self._last, None
        self.on_record(profile)
        with self._best_effort.attempt():
            append_line(self.folder / PROFILE, json.dumps(asdict(profile), allow_nan=False))
