"""The loss of a step, which is split into micro-batches.

Supervised fine-tuning sums cross-entropies. The loss of sampled answers is a sum over their tokens.
For preferences, if no row is split and a row's loss depends on no other row, one pass computes loss
and gradient. Otherwise a first pass computes the log-probabilities of all examples, and a second
pass the gradient of `sum(w * logp)`, where `w` is the derivative of the loss with respect to
`logp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxtune.backend.forward.forward import ReduceFn, summed
from mlxtune.core.data.encode import Example, StepExamples, predicted_tokens
from mlxtune.core.objectives.objective import AnswerLayout, Objective, StepTotals
from mlxtune.core.objectives.policy import (
    PolicyObjective,
    SampledExample,
    SampleTotals,
    TokenLogps,
)
from mlxtune.core.steps.pack import StepLengths
from mlxtune.errors import ModelError

# Tolerances for rounding: absolute for the first loss, and relative for a log-probability in 32 and
# 16 bits.
_FIRST_LOSS_TOLERANCE, _LOGP_TOLERANCE, _LOGP_TOLERANCE_16_BITS = 1e-6, 1e-6, 1e-2
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepLoss:
    """The loss of a step: the mean cross-entropy of `tokens` supervised tokens.

    `total_tokens` counts all tokens of the examples that get a gradient. The functions `reduce` of
    all micro-batches add up to `divisor` times the loss. They also return values, which add up from
    `zeros`, for metrics.
    """

    tokens: int
    total_tokens: int

    @property
    def divisor(self) -> int:
        return self.tokens

    @property
    def known_loss(self) -> float | None:
        """The step's loss, if forward passes have already computed it; otherwise None."""
        return None

    def zeros(self) -> list[mx.array]:
        return []

    def reduce(self, members: Sequence[int], counts: Sequence[int]) -> ReduceFn:
        """Return the loss of a micro-batch as a function.

        `members` are the indices of its examples, `counts` the numbers of their supervised tokens.
        """
        return summed

    def metrics(self, values: Sequence[mx.array]) -> dict[str, float]:
        return {}

    def check_first_loss(self, values: Sequence[mx.array], *, in_16_bits: bool) -> None:
        """Raise ModelError if the values of the first step do not match the reference, if any."""


@dataclass(frozen=True)
class PreferenceLoss(StepLoss):
    """The loss of a step's preferences, on `examples`, which get a gradient.

    `weights` (E,), if not None, are the derivatives of the loss with respect to `logps` (E,), the
    log-probabilities of the examples. The only value of a micro-batch is an array (E,) of the
    log-probabilities of its examples, and of zeros for the others.
    """

    examples: Sequence[Example]
    objective: Objective
    layout: AnswerLayout
    totals: StepTotals
    weights: _Floats | None = None
    logps: _Floats | None = None

    @property
    def divisor(self) -> int:
        return 1

    @property
    def known_loss(self) -> float | None:
        return None if self.logps is None else self._of(self.logps)

    def zeros(self) -> list[mx.array]:
        return [mx.zeros(len(self.examples))]

    def reduce(self, members: Sequence[int], counts: Sequence[int]) -> ReduceFn:
        """Return a function that maps a micro-batch's losses to its part of the step's loss.

        With `weights`, the step's loss is `sum(weights * logps)`.
        """
        loss_of_members = (
            self._own_weights(members) if self.weights is not None else self._own_loss(members)
        )
        owners = mx.array(np.repeat(np.arange(len(members)), counts))
        indices = mx.array(list(members))

        def loss(losses: mx.array) -> tuple[mx.array, ...]:
            logps = mx.zeros(len(members)).at[owners].add(-losses.astype(mx.float32))
            return loss_of_members(logps), self.zeros()[0].at[indices].add(logps)

        return loss

    def metrics(self, values: Sequence[mx.array]) -> dict[str, float]:
        logps = np.array(values[0], dtype=np.float64)
        return self.objective.metrics(logps, self.layout, self.totals.kl)

    def check_first_loss(self, values: Sequence[mx.array], *, in_16_bits: bool) -> None:
        """Raise ModelError if the first step's loss does not match the reference.

        At the first step, policy and reference are the same model, so DPO's loss is ln 2, except
        for rounding: the reference may have run in different micro-batches.
        """
        expected = self.objective.expected_first_loss(self.layout)
        if expected is None:
            return
        logps = np.array(values[0], dtype=np.float64)
        first_loss = self._of(logps)
        rounding = _LOGP_TOLERANCE_16_BITS if in_16_bits else _LOGP_TOLERANCE
        size = float(np.abs(logps).sum()) / self.layout.rows
        allowed = _FIRST_LOSS_TOLERANCE + self.objective.options.effective_beta * rounding * size
        if not abs(first_loss - expected) <= allowed:
            raise ModelError(
                f"the first loss is {first_loss:.7f}, but should be {expected:.7f}: "
                "the reference's log-probabilities do not match this model and data: start "
                "over with --overwrite and --no-cache"
            )

    def _of(self, logps: _Floats) -> float:
        """Return the step's loss from the log-probabilities of its examples (E,)."""
        return float(self.objective.loss(self.layout.sums(logps), self.layout, self.totals))

    def _own_weights(self, members: Sequence[int]) -> Callable[[mx.array], mx.array]:
        assert self.weights is not None
        weights = mx.array(self.weights[list(members)].astype(np.float32))
        return lambda logps: logps @ weights

    def _own_loss(self, members: Sequence[int]) -> Callable[[mx.array], mx.array]:
        layout = self.objective.lay_out([self.examples[i] for i in members])
        slots = mx.array(layout.slots)

        def loss(logps: mx.array) -> mx.array:
            sums = mx.zeros(layout.counts.size).at[slots].add(logps).reshape(layout.counts.shape)
            total: mx.array = self.objective.loss(sums, layout, self.totals, mx)
            return total

        return loss


@dataclass(frozen=True)
class PolicyLoss(StepLoss):
    """The loss of a step's sampled answers; only `examples` get a gradient.

    The only value of a micro-batch is an array (E, A) of the log-probabilities of its examples'
    tokens, and of zeros for the others.
    """

    examples: Sequence[SampledExample]
    objective: PolicyObjective
    totals: SampleTotals

    @classmethod
    def of(cls, objective: PolicyObjective, examples: StepExamples) -> PolicyLoss:
        """Return the loss of sampled answers. Raises TypeError if an example is not sampled."""
        training = _samples(examples.training)
        totals = SampleTotals.of([*training, *_samples(examples.others)])
        return cls(totals.tokens, sum(map(len, training)), training, objective, totals)

    @property
    def divisor(self) -> int:
        return 1

    @cached_property
    def _logps(self) -> TokenLogps:
        return TokenLogps.of(self.examples)

    def zeros(self) -> list[mx.array]:
        return [mx.zeros(self._logps.mask.shape)]

    def reduce(self, members: Sequence[int], counts: Sequence[int]) -> ReduceFn:
        own = TokenLogps.of([self.examples[i] for i in members])
        shape = own.mask.shape
        indices = mx.array(list(members))
        slots = mx.array(np.flatnonzero(own.mask))

        def loss(losses: mx.array) -> tuple[mx.array, ...]:
            flat = mx.zeros(shape[0] * shape[1]).at[slots].add(-losses.astype(mx.float32))
            trained = flat.reshape(shape)
            logps = own.with_trained(trained, mx.stop_gradient(trained), mx)
            total = self.objective.loss(logps, self.totals, mx)
            return total, self.zeros()[0].at[indices, : shape[1]].add(trained)

        return loss

    def metrics(self, values: Sequence[mx.array]) -> dict[str, float]:
        trained = np.array(values[0], dtype=np.float64)
        return self.objective.metrics(self._logps.with_trained(trained, trained), self.totals)


def sft_loss(lengths: StepLengths) -> StepLoss:
    """Return the loss of supervised fine-tuning, from the lengths of all examples of a step.

    Raises ValueError if no token is supervised.
    """
    return StepLoss(count_tokens(lengths.supervised), sum(lengths.tokens))


def preference_loss(
    objective: Objective,
    examples: StepExamples,
    logps_of: Callable[[Sequence[Example]], _Floats],
    *,
    is_divided: bool,
) -> PreferenceLoss:
    """Return the loss of a step's preferences, after the forward passes that must come first.

    `is_divided` says whether any row's examples are in several micro-batches; `logps_of` computes
    log-probabilities (E,). Both cover all workers. Raises ValueError if no token is supervised.
    """
    training = examples.training
    tokens = count_tokens(map(predicted_tokens, training)), sum(map(len, training))
    layout = objective.lay_out(training)
    kl = 0.0
    if examples.others:
        between = objective.lay_out(examples.others)
        kl = objective.kl(between, between.sums(logps_of(examples.others)))
    totals = objective.totals(layout, kl)
    if not (objective.is_across_rows or is_divided):
        return PreferenceLoss(*tokens, training, objective, layout, totals)
    logps = logps_of(training)
    weights = _weights(objective, layout, totals, logps)
    return PreferenceLoss(*tokens, training, objective, layout, totals, weights, logps)


def _samples(examples: Iterable[Example]) -> list[SampledExample]:
    samples = list[SampledExample]()
    for example in examples:
        if not isinstance(example, SampledExample):
            raise TypeError("an example of a policy's step was not sampled")
        samples.append(example)
    return samples


def count_tokens(counts: Iterable[int]) -> int:
    """Return the sum of examples' predicted supervised tokens. Raises ValueError if it is 0."""
    if tokens := sum(counts):
        return tokens
    raise ValueError(
        "no example has a supervised token after its first token: nothing is predicted"
    )


def divides_rows(row_ids: Sequence[int], micro_batches: Iterable[Sequence[int]]) -> bool:
    """Return whether the examples of any row are in several micro-batches, given as indices."""
    seen: set[int] = set()
    for indices in micro_batches:
        keys = {row_ids[i] for i in indices}
        if seen & keys:
            return True
        seen |= keys
    return False


def _weights(
    objective: Objective, layout: AnswerLayout, totals: StepTotals, logps: _Floats
) -> _Floats:
    """Return the derivatives of the loss with respect to the log-probabilities, float64 (E,)."""

    def loss(sums: mx.array) -> Any:
        return objective.loss(sums, layout, totals, mx)

    sums = mx.array(layout.sums(logps).astype(np.float32))
    derivatives = np.array(mx.grad(loss)(sums), dtype=np.float64)
    return derivatives.reshape(-1)[layout.slots]
