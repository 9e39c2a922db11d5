"""An optimizer step, and the loss and gradients that its graph computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlxtune.backend.lora.optimizer import OptimizerUpdate
from mlxtune.backend.step.runner import Graph
from mlxtune.backend.step.step_loss import StepLoss
from mlxtune.backend.workers.workers import StepCounts
from mlxtune.core.data.encode import StepExamples
from mlxtune.core.steps.pack import StepLengths
from mlxtune.core.training.pipeline import StepOutcome
from mlxtune.core.training.requests import NO_REQUESTS, Requests
from mlxtune.errors import NonFiniteLossError


class StepGradients:
    """The loss and gradients of a step, summed over its micro-batches, and the resulting update.

    `loss` is in nats per supervised token, or the preference loss that `step_loss` defines. The
    gradients are float32: vectors or, from `loss_and_gradients`, a tree of parameters. `counts` are
    this worker's counts. `graph` computes the last micro-batch and the `update`, if any. With
    several workers, loss, gradients and the loss's `values` are sums over all workers, as is
    `summed_counts`, the array of the counts.
    """

    def __init__(self, step_loss: StepLoss) -> None:
        self.step_loss = step_loss
        self.loss: Any = mx.array(0.0)
        self.values = step_loss.zeros()
        self.gradients: Any = None
        self.graph = Graph(0, 1, [], {}, self.loss)
        self.counts = StepCounts()
        self.summed_counts: mx.array | None = None
        self.update: OptimizerUpdate | None = None

    @property
    def tokens(self) -> int:
        """The number of supervised tokens of the step."""
        return self.step_loss.tokens

    def all_counts(self) -> StepCounts:
        """Return the counts over all workers, once the graph is computed."""
        summed = self.summed_counts
        return self.counts if summed is None else StepCounts.from_array(summed)

    @property
    def sums(self) -> tuple[Any, Any, Any]:
        """The sums over the micro-batches so far, which a graph computes."""
        return self.loss, self.gradients, self.values

    def add(
        self, values: Sequence[mx.array], gradients: list[mx.array], tokens: int, padding: int
    ) -> None:
        """Add a micro-batch: its loss, with the values that come with it, gradients and tokens."""
        loss, *rest = values
        self.loss = self.loss + loss
        self.values = [total + part for total, part in zip(self.values, rest, strict=True)]
        first = self.gradients is None
        self.gradients = gradients if first else tree_map(mx.add, self.gradients, gradients)
        counts = self.counts
        self.counts = counts._replace(
            micro_batches=counts.micro_batches + 1,
            forward_tokens=counts.forward_tokens + tokens,
            padding=counts.padding + padding,
        )

    def finish(self, vectors: Sequence[mx.array], loss_scale: float) -> None:
        """Undo float16's loss scale, after all micro-batches of this worker.

        A loss that is known from forward passes replaces the sum. Without micro-batches, as when
        workers outnumber the examples, the gradients are zeros like `vectors`.
        """
        if self.gradients is None:
            self.gradients = tree_map(mx.zeros_like, vectors)
        if loss_scale != 1:
            self.loss, self.gradients = tree_map(
                lambda each: each / loss_scale, (self.loss, self.gradients)
            )
        self._use_known_loss()

    def merge(
        self, loss: mx.array, gradients: Any, counts: mx.array, values: list[mx.array]
    ) -> None:
        """Replace this worker's sums by the sums over all workers; a known loss stays."""
        self.loss, self.gradients, self.values = loss, gradients, values
        self.summed_counts = counts
        self.graph = replace(self.graph, arrays=(loss, gradients, counts, values))
        self._use_known_loss()

    def _use_known_loss(self) -> None:
        if (loss := self.step_loss.known_loss) is not None:
            self.loss = mx.array(loss)

    def set_update(self, update: OptimizerUpdate) -> None:
        """Set the update, which the graph computes with the sums in one wait for the device."""
        self.update = update
        self.graph = replace(
            self.graph, arrays=(self.loss, self.summed_counts, self.values, update)
        )

    def read(self, matrices: Callable[[list[mx.array]], dict[str, mx.array]]) -> None:
        """Make the computed loss a float, and the gradients the `matrices` of the vectors."""
        self.loss = float(self.loss)
        self.gradients = matrices(self.gradients)


@dataclass(eq=False)
class OptimizerStep:
    """Step `number` on `examples`, at a learning rate, or without one only its gradients.

    `all_lengths` are the lengths of its training examples. This worker computes the gradients of
    the training examples at `own_indices`, with their `lengths`. With several workers, the step
    sends the `requests` of this worker. `built` is the step's graph until it is computed,
    or fails, and `builds` how often it was built. A committed step has an `outcome`. `started` is a
    `time.perf_counter`.
    """

    number: int
    learning_rate: float | None
    examples: StepExamples
    all_lengths: StepLengths
    own_indices: Sequence[int]
    lengths: StepLengths
    requests: Requests = NO_REQUESTS
    built: StepGradients | None = None
    builds: int = 0
    outcome: StepOutcome | None = None
    started: float = field(default_factory=time.perf_counter)

    def take_built(self) -> StepGradients:
        """Return the graph and forget it, so that a failed graph's arrays are freed."""
        built, self.built = self.built, None
        assert built is not None
        return built

    def not_finite(self, loss: float, grad_norm: float) -> NonFiniteLossError:
        """Return the reason why the step was not applied, and a remedy."""
        at = f"at learning rate {self.learning_rate:g}"
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return NonFiniteLossError(
                f"step {self.number}: the adapter would not be finite after a step {at}; "
                "the step was not applied: lower --lr"
            )
        what = f"gradient norm is {grad_norm}" if math.isfinite(loss) else f"loss is {loss}"
        return NonFiniteLossError(
            f"step {self.number}: the {what} {at}; the step was not applied: "
            "lower --lr, or use --dtype float32"
        )
