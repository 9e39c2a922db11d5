"""A meter and a clock that say what they are told, for tests of profiling."""

from __future__ import annotations

from collections.abc import Sequence

from mlxtune.core.data.encode import Example
from mlxtune.core.training.profile import LayerProfile, PhaseTimer

LAYERS = [
    LayerProfile("layers.0", 1.0, 2.0, 300, 400),
    LayerProfile("head", 0.5, 0.25, 100, 200),
]


class Ticking:
    """A clock that goes on by a second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class FakeMeter:
    """Says that memory rises by 10 bytes at each border, with a peak of 5 more.

    `attached` has a True for each step that is to be measured, and a False for its end; `measured`
    the step and rows of each pass over the layers.
    """

    def __init__(self) -> None:
        self.active = 100
        self.attached: list[bool] = []
        self.measured: list[tuple[int, list[int]]] = []
        self.timer: PhaseTimer | None = None

    def memory(self) -> tuple[int, int]:
        self.active += 10
        return self.active, self.active + 5

    def attach(self, timer: PhaseTimer | None) -> None:
        self.attached.append(timer is not None)
        self.timer = timer

    def layers(self, examples: Sequence[Example], step: int) -> list[LayerProfile]:
        self.measured.append((step, [example.row for example in examples]))
        return list(LAYERS)
