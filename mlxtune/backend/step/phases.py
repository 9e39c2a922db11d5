"""Measures the phases of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlxtune.backend.device import allocator
from mlxtune.backend.forward.forward import Forward, HeadFn, StepInputs
from mlxtune.core.run.profile import PhaseTimer


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
        return int(mx.get_active_memory()), allocator.lap_peak()

    def end(self, name: str, *arrays: Any) -> None:
        """End a phase after evaluating the arrays that it computes, so that their time counts."""
        if self.timer is not None:
            if arrays:
                mx.eval(*arrays)
            self.timer.end(name)

    def gradients(
        self, parameters: Mapping[str, mx.array], inputs: StepInputs, *rest: Any
    ) -> tuple[tuple[mx.array, ...], dict[str, mx.array]]:
        """Return the values and gradients that `Forward.gradients` returns, and time the phases.

        The phases are data, which ends here, forward, loss (the head) and backward.
        """
        self.end("data", inputs.arrays)
        states: list[mx.array] = []

        def around(head: HeadFn, hidden: mx.array) -> Sequence[mx.array]:
            # Layers that are not lazy have finished here.
            states.append(hidden)
            self.end("forward")
            return head(hidden)

        def values_and_states(*args: Any) -> tuple[Any, ...]:
            values = self._forward.scaled_loss(*args)
            self.end("loss" if states else "forward")
            return *values, states

        with self._forward.watched(around):
            compute = mx.value_and_grad(values_and_states)
            (*values, states), gradients = compute(parameters, inputs, *rest)
        self.end("backward")
        if states:
            self.end("forward", states)
        self.end("loss" if states else "forward", values[0])
        self.end("backward", gradients)
        return tuple(values), gradients
