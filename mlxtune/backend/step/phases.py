"""The phases of a step, for who measures them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

from mlxtune.backend.step.forward import Forward
from mlxtune.core.training.profile import PhaseTimer


class Computes(Protocol):
    """What of a pipeline computes the gradients of a micro-batch."""

    forward: Forward
    gradients: Callable[..., tuple[mx.array, dict[str, Any]]]

    def scaled_loss(
        self, parameters: dict[str, Any], arrays: dict[str, Any], scale: mx.array
    ) -> mx.array: ...


class Phases:
    """Where a pipeline tells of the borders of its phases. Here nothing is made of them."""

    def end(self, name: str, *arrays: Any) -> None:
        """A phase ended, which computed these arrays, or what was asked for already."""

    def gradients(self, pipeline: Computes, *args: Any) -> tuple[mx.array, dict[str, Any]]:
        """Return loss and gradients of a micro-batch."""
        found: tuple[mx.array, dict[str, Any]] = pipeline.gradients(*args)
        return found


class MeasuredPhases(Phases):
    """Evaluates at the end of each phase, and reports it to `timer`."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer

    def end(self, name: str, *arrays: Any) -> None:
        """Wait for what the phase computed."""
        if arrays:
            mx.eval(*arrays)
        self._timer.end(name)

    def gradients(self, pipeline: Computes, *args: Any) -> tuple[mx.array, dict[str, Any]]:
        """Tell the head, which is the loss, from the layers below it where the graph shows both.

        A compiled graph does not: its forward phase includes the loss.
        """
        if pipeline.forward.how.compile:
            part, grads = pipeline.gradients(*args)
            self.end("forward", part)
            self.end("backward", grads)
            return part, grads
        rows_seen: list[mx.array] = []

        def around(head: Callable[[mx.array], mx.array], rows: mx.array) -> mx.array:
            # Where layers are computed as they are called, they are done by now.
            rows_seen.append(rows)
            self.end("forward")
            return head(rows)

        def loss_and_rows(*args: Any) -> tuple[mx.array, list[mx.array]]:
            loss = pipeline.scaled_loss(*args)
            self.end("loss" if rows_seen else "forward")
            return loss, rows_seen

        with pipeline.forward.watched(around):
            (part, rows), grads = mx.value_and_grad(loss_and_rows)(*args)
        self.end("backward")
        if rows:
            self.end("forward", rows)
        self.end("loss" if rows else "forward", part)
        self.end("backward", grads)
        return part, grads
