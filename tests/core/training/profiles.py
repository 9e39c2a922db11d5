"""A meter and a clock with fixed readings, for tests of profiling."""

from __future__ import annotations

from mlxtune.core.run.profile import PhaseTimer


class Ticking:
    """A clock that advances by a second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class FakeMeter:
    """Reports memory that rises by 10 bytes at each border, with a peak 5 bytes higher.

    `attached` has a True for each measured step, and a False for its end.
    """

    def __init__(self) -> None:
        self.active = 100
        self.attached: list[bool] = []
        self._timer: PhaseTimer | None = None

    def memory(self) -> tuple[int, int]:
        self.active += 10
        return self.active, self.active + 5

    @property
    def timer(self) -> PhaseTimer | None:
        return self._timer

    @timer.setter
    def timer(self, timer: PhaseTimer | None) -> None:
        self.attached.append(timer is not None)
        self._timer = timer
