"""The phases of a step, for those who measure them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from mlxtune.backend.step.forward import Forward
from mlxtune.core.training.profile import PhaseTimer

# Takes parameters, the arrays of a micro-batch and a scale; returns the loss and its gradients.
Gradients = Callable[..., tuple[mx.array, dict[str, Any]]]


class Phases:
    """The borders between the phases of a step, which nobody measures."""

    def end(self, name: str, *arrays: Any) -> None:
        """End a phase that computed these arrays, or what was evaluated already."""

    def gradients(self, forward: Forward) -> Gradients:
        """Return what computes loss and gradients of a micro-batch."""
        return forward.gradients


class MeasuredPhases(Phases):
    """Evaluates at each border, and ends a lap there."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer

    def end(self, name: str, *arrays: Any) -> None:
        """Wait for what the phase computed."""
        if arrays:
            mx.eval(*arrays)
        self._timer.end(name)

    def gradients(self, forward: Forward) -> Gradients:
        """Return what also ends the phases within: forward, loss (the head) and backward.

        A compiled graph shows no border before the head: its forward phase includes the loss.
        """
        return partial(self._compiled if forward.execution.compile else self._traced, forward)

    def _compiled(self, forward: Forward, *args: Any) -> tuple[mx.array, dict[str, Any]]:
        loss, gradients = forward.gradients(*args)
        self.end("forward", loss)
        self.end("backward", gradients)
        return loss, gradients

    def _traced(self, forward: Forward, *args: Any) -> tuple[mx.array, dict[str, Any]]:
        rows_seen: list[mx.array] = []

        def around(head: Callable[[mx.array], mx.array], rows: mx.array) -> mx.array:
            # Layers that are computed as they are called are done by now.
            rows_seen.append(rows)
            self.end("forward")
            return head(rows)

        def loss_and_rows(*args: Any) -> tuple[mx.array, list[mx.array]]:
            loss = forward.scaled_loss(*args)
            self.end("loss" if rows_seen else "forward")
            return loss, rows_seen

        with forward.watched(around):
            (loss, rows), gradients = mx.value_and_grad(loss_and_rows)(*args)
        self.end("backward")
        if rows:
            self.end("forward", rows)
        self.end("loss" if rows else "forward", loss)
        self.end("backward", gradients)
        return loss, gradients
