"""A step that the device works on while the host does something else."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlxtune.backend.lora.optimizer import Update
from mlxtune.backend.step.stages import Graph, Stages
from mlxtune.core.run.metrics import InstructBatchResult
from mlxtune.errors import NonFiniteLossError


@dataclass
class StepGradients:
    """Loss and gradients of a step, and how they are computed.

    `loss` is in nats per supervised token, of which there are `tokens`; `gradients` are vectors, or
    by parameter where a caller asks for them; both are float32. `run_tokens` go through the model
    in `micro_batches`, `padding` among them. `graph` computes the last of them. With several
    workers, loss and gradients are those of all, and `counts` has the three numbers and what the
    workers ask for, float32 (5,), as sums.
    """

    loss: Any
    gradients: Any
    tokens: int
    micro_batches: int
    run_tokens: int
    padding: int
    graph: Graph
    counts: Any = None


# The gradients of a step and its update, which the graph computes, too.
Started = tuple[StepGradients, Update]


class PendingStep:
    """One optimizer step that was started.

    `build` makes its graph, `run` tries again what fails for lack of memory, and `commit` makes the
    update that was computed the state of the pipeline; it returns the step's result, or the error
    that `result` raises. The step was computed at `ended` by `time.perf_counter`.
    """

    def __init__(
        self,
        stages: Stages,
        build: Callable[[], Started],
        run: Callable[[Callable[[], Started]], Started],
        commit: Callable[[Started], InstructBatchResult | NonFiniteLossError],
    ) -> None:
        self._stages = stages
        self._build = build
        self._run = run
        self._commit = commit
        self._started: Started | None = None
        self._outcome: InstructBatchResult | NonFiniteLossError | None = None
        self.ended = 0.0

    @property
    def update(self) -> Update | None:
        """The update while it is being computed."""
        return self._started and self._started[1]

    def start(self, built: Started | None) -> None:
        """Have the device compute a graph that was built, or else a new one."""
        self._started = built or self._run(self._build)
        # Errors surface in `finish`, which tries again.
        with suppress(RuntimeError, MemoryError):
            self._stages.start(self._started[0].graph)

    def finish(self) -> bool:
        """Wait for the step; return whether it was computed as started, with no second try.

        Raises MemoryLimitError or GpuError, and changes nothing.
        """
        if self._outcome is not None:
            return True
        tries = 0

        def compute() -> Started:
            nonlocal tries
            tries += 1
            started, self._started = self._started, None
            found, update = started or self._build()
            self._stages.finish(found.graph)
            return found, update

        self._outcome = self._commit(self._run(compute))
        self.ended = time.perf_counter()
        return tries == 1

    def result(self) -> InstructBatchResult:
        """Wait for the step and return its result.

        Raises NonFiniteLossError if it changed nothing because loss or gradient is not finite.
        """
        self.finish()
        if isinstance(self._outcome, NonFiniteLossError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


def describe_non_finite(step: int, rate: float, loss: float, grad_norm: float) -> str:
    """Return why a step was not applied, and what may help."""
    at = f"at learning rate {rate:g}"
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return (
            f"step {step}: the adapter is not finite after a step {at}; "
            "the step was not applied: lower --lr"
        )
    what = f"gradient norm is {grad_norm}" if math.isfinite(loss) else f"loss is {loss}"
    return (
        f"step {step}: the {what} {at}; the step was not applied: "
        "lower --lr, or use --dtype float32"
    )
