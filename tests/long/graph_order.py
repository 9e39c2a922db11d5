"""The operations of an exported graph that its outputs need, in the order MLX computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# MLX_BFS_MAX_WIDTH: the number of operations that MLX orders breadth first.
_WIDTH = 20


@dataclass(frozen=True)
class Operation:
    """A primitive of the graph, with the names of its input and output arrays."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def tie(graph: Sequence[Operation], tied: Mapping[str, str]) -> list[Operation]:
    """Return the operations with placeholders replaced by the arrays they stand for."""
    return [
        replace(each, inputs=tuple(followed(name, tied) for name in each.inputs))
        for each in graph
        if tied.keys().isdisjoint(each.outputs)
    ]


def followed(name: str, tied: Mapping[str, str]) -> str:
    """Return the array that a placeholder stands for; any other array is returned unchanged."""
    while name in tied:
        name = tied[name]
    return name


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
    # Backwards from the outputs: breadth first, but depth first once the queue is _WIDTH long.
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
