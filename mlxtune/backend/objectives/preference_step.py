"""The loss of a preference step, split into micro-batches.

If no row is split and a row's loss depends on no other row, one pass computes loss and gradient.
Otherwise a first pass computes the log-probabilities of all examples, and a second pass the
gradient of `sum(w * logp)`, where `w` is the derivative of the loss with respect to `logp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxtune.backend.forward.forward import Reduce
from mlxtune.core.data.conversation import MISMATCHED
from mlxtune.core.data.encode import Example
from mlxtune.core.objectives.objective import Layout, Objective, Totals
from mlxtune.core.steps.batch import MicroBatch
from mlxtune.core.steps.pack import Pack
from mlxtune.errors import ModelError

# Tolerances for rounding: absolute for the first loss, and relative for a log-probability in 32 and
# 16 bits.
_FIRST_LOSS, _ROUNDING, _ROUNDING_16_BITS = 1e-6, 1e-6, 1e-2
_Floats = npt.NDArray[np.float64]
Batch = MicroBatch | Pack


@dataclass(frozen=True)
class PreferenceStep:
    """The loss of a step on the `examples` that get a gradient.

    `weights` (E,), if not None, are the derivatives of the loss with respect to `logps` (E,), the
    log-probabilities of the examples.
    """

    objective: Objective
    examples: Sequence[Example]
    layout: Layout
    totals: Totals
    weights: _Floats | None = None
    logps: _Floats | None = None

    def reduce(self, members: Sequence[int], batch: Batch) -> Reduce:
        """Return the function from a micro-batch's losses to its share of the step's loss.

        With `weights`, it is the share of `sum(w * logp)`. The function also returns the
        log-probabilities of the micro-batch's examples, whose indices are `members`.
        """
        owners = mx.array(np.repeat(np.arange(len(members)), batch.counts))

        def logps(losses: mx.array) -> mx.array:
            return mx.zeros(len(members)).at[owners].add(-losses.astype(mx.float32))

        if self.weights is not None:
            weights = mx.array(self.weights[list(members)].astype(np.float32))
            return lambda losses: ((found := logps(losses)) @ weights, found)
        layout = self.objective.lay_out([self.examples[i] for i in members])
        slots = mx.array(layout.slots)

        def loss(losses: mx.array) -> tuple[mx.array, ...]:
            found = logps(losses)
            sums = mx.zeros(layout.counts.size).at[slots].add(found).reshape(layout.counts.shape)
            return self.objective.loss(sums, layout, self.totals, mx), found

        return loss

    @property
    def known_loss(self) -> float | None:
        """The step's loss, if the log-probabilities are already known; otherwise None."""
        if self.logps is None:
            return None
        return float(self.objective.loss(self.layout.sums(self.logps), self.layout, self.totals))

    def check_first_loss(self, logps: _Floats, *, in_16_bits: bool) -> None:
        """Raise ModelError if the first step's loss does not match the reference.

        At the first step, policy and reference are the same model, so DPO's loss is ln 2. Rounding
        may differ, because the reference may have run in different micro-batches.
        """
        expected = self.objective.expected_first_loss(self.layout)
        if expected is None:
            return
        found = self.objective.loss(self.layout.sums(logps), self.layout, self.totals)
        rounding = _ROUNDING_16_BITS if in_16_bits else _ROUNDING
        size = float(np.abs(logps).sum()) / self.layout.rows
        allowed = _FIRST_LOSS + self.objective.options.strength * rounding * size
        if not abs(float(found) - expected) <= allowed:
            raise ModelError(
                f"the first loss is {float(found):.7f}, but should be {expected:.7f}: "
                "the reference's log-probabilities are not those of this model and data: start "
                "over with --overwrite and --no-cache"
            )

    def metrics(self, logps: _Floats) -> dict[str, float]:
        """Return the metrics of the step from the log-probabilities of its examples (E,)."""
        return self.objective.metrics(logps, self.layout, self.totals.kl)


def prepare(
    objective: Objective,
    examples: Sequence[Example],
    is_split: Callable[[], bool],
    logps_of: Callable[[Sequence[Example]], _Floats],
) -> PreferenceStep:
    """Return the loss of a step, after the forward passes that must come first.

    `is_split` returns whether any row's examples are in several micro-batches; `logps_of` computes
    log-probabilities (E,). Both cover all workers.
    """
    training, others = training_examples(examples), [e for e in examples if e.role == MISMATCHED]
    layout, kl = objective.lay_out(training), 0.0
    if others:
        between = objective.lay_out(others)
        kl = objective.kl(between, between.sums(logps_of(others)))
    totals = objective.totals(layout, kl)
    if not (objective.is_across_rows or is_split()):
        return PreferenceStep(objective, training, layout, totals)
    logps = logps_of(training)
    weights = _weights(objective, layout, totals, logps)
    return PreferenceStep(objective, training, layout, totals, weights, logps)


def training_examples(examples: Sequence[Example]) -> list[Example]:
    """Return the examples of a step that get a gradient."""
    return [example for example in examples if example.role != MISMATCHED]


def splits_rows(examples: Sequence[Example], groups: Iterable[Sequence[int]]) -> bool:
    """Return whether the examples of any row are in several groups of indices."""
    seen: set[int] = set()
    for group in groups:
        keys = {examples[i].key for i in group}
        if seen & keys:
            return True
        seen |= keys
    return False


def _weights(objective: Objective, layout: Layout, totals: Totals, logps: _Floats) -> _Floats:
    """Return the derivatives of the loss with respect to the log-probabilities, float64 (E,)."""

    def loss(sums: mx.array) -> Any:
        return objective.loss(sums, layout, totals, mx)

    sums = mx.array(layout.sums(logps).astype(np.float32))
    found = np.array(mx.grad(loss)(sums), dtype=np.float64)
    return found.reshape(-1)[layout.slots]
