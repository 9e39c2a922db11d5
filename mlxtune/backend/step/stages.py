"""Evaluation in stages: no command keeps a Mac's GPU busy for much longer than a second.

macOS ends commands that keep the GPU from drawing the display for some seconds (mlx#3267).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxtune.backend.device import memory
from mlxtune.backend.device.device import has_metal, on_cpu
from mlxtune.backend.forward.forward import Forward
from mlxtune.backend.forward.side_by_side import Mixers
from mlxtune.core.run.profile import PhaseTimer

# The seconds that a stage may take; operations a second before any was timed, which the slowest
# Macs reach; and operations for each parameter and token, forward and backward.
_SECONDS = 1.0
_METAL_SPEED = 1e12
_OPERATIONS = 6
# How much of a micro-batch's time is its forward pass.
_FORWARD = 1 / 3
Gradients = tuple[mx.array, dict[str, Any]]


@dataclass(frozen=True)
class Graph:
    """A micro-batch to compute: `arrays`, which need its `gradients` and, before, the `outputs`.

    One that has no gradients is a forward pass. `outputs` is emptied once the graph is started.
    """

    tokens: int
    stages: int
    outputs: list[mx.array]
    gradients: Any
    arrays: Any

    def parts(self) -> list[Sequence[Any]]:
        """Return what each stage evaluates; the graph keeps none of the outputs."""
        found: list[Sequence[Any]] = []
        if self.stages > 1:
            forward = max(int(self.stages * _FORWARD), 1)
            found += _divided(self.outputs, forward)
            self.outputs.clear()
            # From the last layer to the first.
            gradients = [array for _, array in tree_flatten(self.gradients)]
            found += _divided(gradients[::-1], max(self.stages - forward, 1))
        return [*found, [self.arrays]]


class Stages:
    """Computes a micro-batch at once or, where that takes long on a Mac, in stages.

    A stage ends at the output of a layer's mixer or at the gradients of a layer. That changes no
    arithmetic, so that the number of stages may follow the clock. `parameters` counts those of the
    model.
    """

    def __init__(self, mixers: Mixers, parameters: int) -> None:
        self._mixers = mixers
        # CUDA ends no command of a card that draws no display.
        cuda = not on_cpu() and not has_metal()
        self._most = 1 if cuda else max(2 * mixers.count, 1)
        # Nothing limits commands on the CPU.
        self.seconds_per_token = 0.0 if on_cpu() else _OPERATIONS * parameters / _METAL_SPEED
        self._shortened = 1
        # Forward passes, and those with a gradient, of which one was timed: it compiled kernels.
        self._compiled: set[bool] = set()
        self._running: Graph | None = None
        self._left: list[Sequence[Any]] = []
        self._started = 0.0

    def shorten(self) -> bool:
        """Make stages half as long from here on; return whether they can be."""
        can = self._shortened < self._most
        self._shortened *= 2 if can else 1
        return can

    def count(self, tokens: int) -> int:
        """Return in how many stages a micro-batch of so many tokens is computed."""
        needed = max(math.ceil(self.seconds_per_token * tokens / _SECONDS), 1)
        return min(needed * self._shortened, self._most)

    def record(self, tokens: int) -> None:
        """Note the outputs of the micro-batch whose graph is built next."""
        if self.count(tokens) > 1:
            self._mixers.note()

    def graph(self, tokens: int, gradients: Any, *arrays: Any) -> Graph:
        """Return the graph of the micro-batch that was built since `record`."""
        outputs, self._mixers.outputs = self._mixers.outputs, []
        self._mixers.stop_noting()
        return Graph(tokens, self.count(tokens) if outputs else 1, outputs, gradients, arrays)

    def start(self, graph: Graph) -> None:
        """Have a graph computed once the one before is: the device never holds two."""
        if self._running is not None:
            self.finish(self._running)
        self._begin(graph)

    def finish(self, graph: Graph) -> None:
        """Wait until a graph is computed."""
        if self._running is not graph:
            self._begin(graph)
        # If it fails, nothing may hold its arrays.
        left, self._left, self._running = self._left, [], None
        while left:
            # The device goes on with the next stage while the host waits for this one.
            for following in left[1:2]:
                mx.async_eval(*following)  # type: ignore[no-untyped-call]
            mx.eval(*left.pop(0))
        if not on_cpu():
            self._time(graph, time.perf_counter() - self._started)

    def _begin(self, graph: Graph) -> None:
        self._running, self._started = graph, time.perf_counter()
        self._left = graph.parts()
        mx.async_eval(*self._left[0])  # type: ignore[no-untyped-call]

    def _time(self, graph: Graph, seconds: float) -> None:
        backward = bool(graph.gradients)
        if backward in self._compiled:
            per_token = seconds / max(graph.tokens, 1)
            self.seconds_per_token = per_token if backward else per_token / _FORWARD
        self._compiled.add(backward)


def _divided(arrays: Sequence[mx.array], count: int) -> Iterator[Sequence[mx.array]]:
    size = math.ceil(len(arrays) / count) or 1
    for start in range(0, len(arrays), size):
        yield arrays[start : start + size]


class Phases:
    """The borders between the phases of a step.

    A `timer` has each phase evaluated at its end, where a lap ends, too. Without one, nothing is
    measured.
    """

    def __init__(self, forward: Forward) -> None:
        self.timer: PhaseTimer | None = None
        self._forward = forward

    def memory(self) -> tuple[int, int]:
        """Return the bytes in use, and the most that were in use since this was last asked."""
        return int(mx.get_active_memory()), memory.lap_peak()

    def end(self, name: str, *arrays: Any) -> None:
        """End a phase that computed these arrays, or what was evaluated already."""
        if self.timer is not None:
            if arrays:
                mx.eval(*arrays)
            self.timer.end(name)

    def gradients(self, *args: Any) -> Gradients:
        """Return what `Forward.gradients` gives, and end the phases within.

        These are forward, loss (the head) and backward.
        """
        rows_seen: list[mx.array] = []

        def around(head: Callable[[mx.array], mx.array], rows: mx.array) -> mx.array:
            # Layers that are computed as they are called are done by now.
            rows_seen.append(rows)
            self.end("forward")
            return head(rows)

        def loss_and_rows(*args: Any) -> tuple[mx.array, list[mx.array]]:
            loss = self._forward.scaled_loss(*args)
            self.end("loss" if rows_seen else "forward")
            return loss, rows_seen

        with self._forward.watched(around):
            (loss, rows), gradients = mx.value_and_grad(loss_and_rows)(*args)
        self.end("backward")
        if rows:
            self.end("forward", rows)
        self.end("loss" if rows else "forward", loss)
        self.end("backward", gradients)
        return loss, gradients
