"""Evaluation in stages: no command keeps a GPU busy for much longer than a second.

macOS ends commands that keep the GPU from drawing the display for some seconds (mlx#3267).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxtune.backend.model.device import on_cpu
from mlxtune.backend.step.side_by_side import Mixers

# The seconds that a stage may take; operations a second before any was timed, which the slowest
# devices of each kind reach; and operations for each parameter and token, forward and backward.
_SECONDS = 1.0
_METAL_SPEED, _CUDA_SPEED = 1e12, 1e13
_OPERATIONS = 6
# How much of a micro-batch's time is its forward pass.
_FORWARD = 1 / 3


@dataclass(frozen=True)
class Graph:
    """A micro-batch to compute: `arrays`, which need its `gradients` and, before, the `outputs`.

    One that has no gradients is a forward pass.
    """

    tokens: int
    stages: int
    outputs: Sequence[mx.array]
    gradients: Any
    arrays: Any


class Stages:
    """Computes a micro-batch at once or, where that takes long, in stages.

    A stage ends at the output of a layer's mixer or at the gradients of a layer. That changes no
    arithmetic, so that the number of stages may follow the clock. `parameters` counts those of the
    model; a graph `splits` unless it is compiled.
    """

    def __init__(self, mixers: Mixers, parameters: int, *, splits: bool) -> None:
        self._mixers = mixers
        self._most = max(2 * mixers.count, 1) if splits else 1
        speed = _METAL_SPEED if mx.metal.is_available() else _CUDA_SPEED
        # Nothing limits commands on the CPU.
        self.seconds_per_token = 0.0 if on_cpu() else _OPERATIONS * parameters / speed
        self._shortened = 1
        self._running: Graph | None = None
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
        self._mixers.outputs = [] if self.count(tokens) > 1 else None

    def graph(self, tokens: int, gradients: Any, *arrays: Any) -> Graph:
        """Return the graph of the micro-batch that was built since `record`."""
        outputs, self._mixers.outputs = self._mixers.outputs or [], None
        return Graph(tokens, self.count(tokens) if outputs else 1, outputs, gradients, arrays)

    def start(self, graph: Graph) -> None:
        """Have a graph computed once the one before is: the device never holds two."""
        before, self._running = self._running, None
        if before is not None:
            self.finish(before)
        self._running, self._started = graph, time.perf_counter()
        if graph.stages == 1:
            mx.async_eval(graph.arrays)  # type: ignore[no-untyped-call]

    def finish(self, graph: Graph) -> None:
        """Wait until a graph is computed."""
        started = self._started if self._running is graph else time.perf_counter()
        self._running = None
        if graph.stages > 1:
            forward = max(int(graph.stages * _FORWARD), 1)
            _evaluate(graph.outputs, forward)
            # From the last layer to the first.
            gradients = [array for _, array in tree_flatten(graph.gradients)]
            _evaluate(gradients[::-1], max(graph.stages - forward, 1))
        mx.eval(graph.arrays)
        if not on_cpu():
            seconds = (time.perf_counter() - started) / (1 if graph.gradients else _FORWARD)
            self.seconds_per_token = seconds / max(graph.tokens, 1)


def _evaluate(arrays: Sequence[mx.array], count: int) -> None:
    size = math.ceil(len(arrays) / count) or 1
    for start in range(0, len(arrays), size):
        mx.eval(*arrays[start : start + size])
