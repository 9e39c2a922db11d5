"""Recurrences by blocks of tokens; the backward pass runs one block at a time again."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxtune.backend.models.autograd import differentiable


def by_blocks(
    run: Callable[..., tuple[mx.array, mx.array]],
    arrays: Sequence[mx.array],
    state: mx.array,
    tokens: int,
) -> tuple[mx.array, mx.array]:
    """Return the outputs (B, T, ...) of a recurrence over arrays (B, T, ...), and its last state.

    `run` takes a block of `tokens` tokens of each array and the state before them, and returns
    their outputs and the state after them. The backward pass keeps the arrays and those states.
    """
    starts = range(0, arrays[0].shape[1], tokens)

    def block(arrays: Sequence[mx.array], start: int) -> list[mx.array]:
        return [x[:, start : start + tokens] for x in arrays]

    def forward(*inputs: mx.array) -> list[mx.array]:
        *whole, first = inputs
        outputs, states = [], [first]
        for start in starts:
            y, state = run(*block(whole, start), states[-1])
            outputs.append(y)
            # Blocks wait for each other, so that one is in memory.
            states += mx.depends([state], [y])
        return [mx.concatenate(outputs, axis=1), *states[1:]]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        *whole, first = primals
        d_outputs, *_, d_state = cotangents
        gradients = []
        for start, state in reversed(list(zip(starts, [first, *outputs[1:-1]], strict=True))):
            given = [*block(whole, start), state]
            (d_y,) = block([d_outputs], start)
            found = mx.vjp(lambda *x: list(run(*x)), given, [d_y, d_state])[1]
            # Together, or what one block computes would wait for the others.
            *made, d_state = mx.depends(found, found)
            gradients.append(made)
        parts = zip(*gradients[::-1], strict=True)
        return [*(mx.concatenate(list(each), axis=1) for each in parts), d_state]

    y, *_, last = differentiable(forward, backward)(*arrays, state)
    return y, last
