"""Graphs with custom gradients that MLX can export, to count their operations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxtune.backend.models import autograd


class ExportableVjp:
    """`mx.vjp` for graphs to export, which cannot contain functions with custom gradients.

    Calls of such functions are cut out: placeholders replace their outputs and their inputs'
    gradients. `tied` pairs each placeholder with the array that it replaces; both are joined by
    name in the exported graph.
    """

    def __init__(self) -> None:
        self.tied: list[tuple[mx.array, mx.array]] = []

    def __call__(
        self,
        function: Callable[..., list[mx.array]],
        primals: Sequence[mx.array],
        cotangents: Sequence[mx.array],
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Return the outputs and the gradients of a function; see `mx.vjp`."""
        calls: list[tuple[Callable[..., Any], Sequence[mx.array], Any, Any]] = []
        put: Callable[[mx.array], mx.array] = self._placeholder

        def cut_out(
            forward: Callable[..., Any], backward: Callable[..., Any], given: tuple[mx.array, ...]
        ) -> Any:
            with _calls_run_by(_plain):
                made = forward(*given)
            outputs = tree_map(put, made)
            calls.append((backward, given, made, outputs))
            return outputs

        def cut(*arrays: mx.array) -> list[mx.array]:
            nonlocal put
            calls.clear()
            rest = iter(arrays[len(primals) :])
            put = lambda _: next(rest)  # noqa: E731
            outputs = function(*arrays[: len(primals)])
            # An array that two functions take becomes two outputs, because MLX allows one cotangent
            # for an array that is returned twice.
            inputs = [mx.depends([each], [each])[0] for _, given, *_ in calls for each in given]
            return [*outputs, *inputs]

        with _calls_run_by(cut_out):
            # The functions' outputs must be known before they can be primals.
            function(*primals)
            stand_ins = [each for *_, outputs in calls for each in _arrays(outputs)]
            gradients = [self._placeholder(each) for _, given, *_ in calls for each in given]
            outputs, found = mx.vjp(cut, [*primals, *stand_ins], [*cotangents, *gradients])
        cotangent, gradient = iter(found[len(primals) :]), iter(gradients)
        self.tied += zip(
            stand_ins, (a for _, _, made, _ in calls for a in _arrays(made)), strict=True
        )
        for backward, given, _, made in calls:
            with _calls_run_by(_plain):
                back = backward(
                    given[0] if len(given) == 1 else given,
                    tree_map(lambda _: next(cotangent), made),
                    made,
                )
            self.tied += zip((next(gradient) for _ in given), _arrays(back), strict=True)
        return list(outputs[: len(outputs) - len(gradients)]), list(found[: len(primals)])

    def _placeholder(self, like: mx.array) -> mx.array:
        """Return a new array with a unique value, so that MLX does not merge it with another."""
        global _placeholders
        _placeholders += 1
        return mx.broadcast_to(mx.array(_placeholders).astype(like.dtype), like.shape)


# The number of placeholders made so far.
_placeholders = 0


@contextmanager
def _calls_run_by(call: autograd.Call) -> Iterator[None]:
    token = autograd.EXPORTED.set(call)
    try:
        yield
    finally:
        autograd.EXPORTED.reset(token)


def _plain(forward: Callable[..., Any], _: Any, primals: tuple[mx.array, ...]) -> Any:
    return forward(*primals)


def _arrays(tree: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten([tree])]
