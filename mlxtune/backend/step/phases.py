"""Measures the phases of a step."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlxtune.backend.device import memory
from mlxtune.backend.forward.forward import Forward
from mlxtune.core.run.profile import PhaseTimer

# The loss (for preferences, the pair of loss and log-probabilities), then the gradients.
Gradients = tuple[Any, dict[str, Any]]


class Phases:
    """The boundaries between the phases of a step.

    With a `timer`, each phase is evaluated and timed when it ends; without a timer, nothing is
    measured.
    """

    def __init__(self, forward: Forward) -> None:
        self.timer: PhaseTimer | None = None
        self._forward = forward

    def memory(self) -> tuple[int, int]:
        """Return the number of bytes in use, and its peak since the previous call."""
        return int(mx.get_active_memory()), memory.lap_peak()

    def end(self, name: str, *arrays: Any) -> None:
        """End a phase after evaluating the arrays that it computes, so that their time counts."""
        if self.timer is not None:
            if arrays:
                mx.eval(*arrays)
            self.timer.end(name)

    def gradients(self, *args: Any) -> Gradients:
        """Return what `Forward.gradients` or `preference_gradients` returns, and time the phases.

        The phases are forward, loss (the head) and backward.
        """
        rows_seen: list[mx.array] = []

        def around(head: Callable[[mx.array], mx.array], rows: mx.array) -> mx.array:
            # Layers that are not lazy have finished here.
            rows_seen.append(rows)
            self.end("forward")
            return head(rows)

        prefers = "reduce" in args[1]

        def loss_and_rows(*args: Any) -> tuple[mx.array, list[mx.array], list[mx.array]]:
            loss, logps = (
                self._forward.preference_loss(*args)
                if prefers
                else (
                    self._forward.scaled_loss(*args),
                    None,
                )
            )
            self.end("loss" if rows_seen else "forward")
            return loss, rows_seen, [] if logps is None else [logps]

        with self._forward.watched(around):
            (loss, rows, logps), gradients = mx.value_and_grad(loss_and_rows)(*args)
        self.end("backward")
        if rows:
            self.end("forward", rows)
        self.end("loss" if rows else "forward", loss)
        self.end("backward", gradients)
        return (loss, *logps) if prefers else loss, gradients
