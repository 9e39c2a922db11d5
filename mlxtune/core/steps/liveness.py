"""What a graph of operations holds while MLX computes it: bytes, as functions of the load.

A size is a vector, the factors of `terms`. The order of the operations and the buffers that they
take over are those of MLX's `eval`. Buffers are freed late, when the device has caught up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Size = npt.NDArray[np.float64]
# MLX_BFS_MAX_WIDTH: how many operations MLX orders breadth first.
_WIDTH = 20
# How an operation uses its first inputs: as the buffer of its outputs, as theirs if nothing else
# needs it, or not at all.
VIEW, IN_PLACE, NEW = "view", "in place", "new"


@dataclass(frozen=True)
class Operation:
    """An operation from arrays to arrays, by name; `sizes` are those of its outputs."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Held:
    """Bytes that are held at `top`, and at all moments, each a size (4,) or sizes (n, 4)."""

    at_top: Size
    moments: npt.NDArray[np.float64]


def terms(tokens: int, lines: int, width: int) -> Size:
    """Return what the factors of a size stand for: 1, tokens, and `width` tokens of `lines`."""
    return np.array([1, tokens, lines * width, lines * width**2], dtype=np.float64)


def held(graph: Sequence[Operation], outputs: Sequence[str], top: str, lag: int) -> Held:
    """Return what a graph holds besides its inputs.

    The array `top` ends its forward pass. `lag`: how far the device is behind; an operation counts
    2, and 1 if it only makes a view, as MLX's CPU counts its dispatches.
    """
    order = ordered(graph, outputs)
    exact, late = _Memory(order, outputs, 0), _Memory(order, outputs, lag)
    at_top = np.zeros(4)
    moments = []
    for operation in order:
        exact.run(operation)
        moments.append(late.run(operation))
        if top in operation.outputs:
            at_top = exact.live.copy()
    return Held(at_top, _largest(np.array(moments)))


def tie(graph: Sequence[Operation], tied: Mapping[str, str]) -> list[Operation]:
    """Return the operations with what placeholders stand for in their place."""
    return [
        replace(each, inputs=tuple(followed(name, tied) for name in each.inputs))
        for each in graph
        if tied.keys().isdisjoint(each.outputs)
    ]


def followed(name: str, tied: Mapping[str, str]) -> str:
    """Return what an array stands for, itself if it is no placeholder."""
    while name in tied:
        name = tied[name]
    return name


class _Memory:
    """The buffers of a graph that is computed operation by operation."""

    def __init__(self, graph: Sequence[Operation], outputs: Sequence[str], lag: int) -> None:
        self.live = np.zeros(4)
        self._lag = lag
        self._uses = Counter(name for operation in graph for name in operation.inputs)
        self._uses.update(outputs)
        # The buffer of each array, the size of each buffer and the number of its holders.
        self._buffers: dict[str, int] = {}
        self._sizes: list[Size] = []
        self._holders: list[int] = []
        self._running: deque[list[int]] = deque()

    def run(self, operation: Operation) -> Size:
        """Run an operation; return what is held meanwhile."""
        for i, (name, size) in enumerate(zip(operation.outputs, operation.sizes, strict=True)):
            self._place(operation, i, name, size)
        live = self.live.copy()
        made = {self._buffers.get(name) for name in operation.outputs}
        read = {self._buffers[name] for name in operation.inputs if name in self._buffers} - made
        for buffer in read:
            self._holders[buffer] += 1
        self._running += [list(read)] if operation.kind == VIEW else [[], list(read)]
        for name in operation.inputs:
            self._uses[name] -= 1
        for name in {*operation.inputs, *operation.outputs}:
            if not self._uses[name] and name in self._buffers:
                self._free(self._buffers[name])
        while len(self._running) > self._lag:
            for buffer in self._running.popleft():
                self._free(buffer)
        return live

    def _place(self, operation: Operation, i: int, name: str, size: Size) -> None:
        """Find the buffer of an output, or make one."""
        inputs = operation.inputs
        if operation.kind == VIEW:
            source = inputs[i] if i < len(inputs) else inputs[0]
            if source not in self._buffers:
                return  # of an input of the graph
            buffer = self._buffers[source]
        else:
            buffer = self._taken_over(operation, size)
        self._holders[buffer] += 1
        self._buffers[name] = buffer

    def _taken_over(self, operation: Operation, size: Size) -> int:
        if operation.kind == IN_PLACE:
            for name in operation.inputs:
                buffer = self._buffers.get(name)
                free = buffer is not None and self._uses[name] == 1 == self._holders[buffer]
                if buffer is not None and free and np.array_equal(self._sizes[buffer], size):
                    return buffer
        self.live += size
        self._sizes.append(size)
        self._holders.append(0)
        return len(self._sizes) - 1

    def _free(self, buffer: int) -> None:
        self._holders[buffer] -= 1
        if not self._holders[buffer]:
            self.live -= self._sizes[buffer]


def ordered(graph: Sequence[Operation], outputs: Sequence[str]) -> list[Operation]:
    """Return the operations that the outputs need, in the order in which MLX computes them."""
    makers = {name: i for i, each in enumerate(graph) for name in each.outputs}
    inputs = [[makers[name] for name in each.inputs if name in makers] for each in graph]
    inputs.append([makers[name] for name in outputs if name in makers])
    uses, reached, stack = [0] * len(inputs), {len(graph)}, [len(graph)]
    while stack:
        for i in inputs[stack.pop()]:
            uses[i] += 1
            if i not in reached:
                reached.add(i)
                stack.append(i)
    # From the outputs backwards: breadth first, and depth first beyond a width.
    tape, at = [len(graph)], 0
    deeper: list[tuple[int, int]] = []
    while at < len(tape) or deeper:
        if at < len(tape):
            node, first = tape[at], 0
            at += 1
        else:
            node, first = deeper.pop()
        for j in range(first, len(inputs[node])):
            if len(tape) - at >= _WIDTH:
                deeper.append((node, j))
                break
            uses[inputs[node][j]] -= 1
            if not uses[inputs[node][j]]:
                tape.append(inputs[node][j])
    return [graph[i] for i in tape[:0:-1]]


def _largest(sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rows that some load may make the largest."""
    largest: list[Size] = []
    for size in sorted(np.unique(sizes, axis=0), key=lambda size: -float(size.sum())):
        if not any((size <= other).all() for other in largest):
            largest.append(size)
    return np.array(largest)
