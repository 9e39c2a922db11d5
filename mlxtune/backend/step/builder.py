"""Builds the graph that computes a step's loss, gradients and update from its micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_map

from mlxtune.backend.device import memory
from mlxtune.backend.forward.forward import Forward, StepInputs, summed
from mlxtune.backend.lora.apply import LoRASummary
from mlxtune.backend.lora.layers import step_keys
from mlxtune.backend.lora.optimizer import LoRAOptimizer, Update
from mlxtune.backend.lora.vectors import LoRAVectors
from mlxtune.backend.objectives.preference_step import (
    PreferenceStep,
    prepare,
    splits_rows,
    training_examples,
)
from mlxtune.backend.step.evaluator import ExampleLosses
from mlxtune.backend.step.phases import Phases
from mlxtune.backend.step.runner import Graph, StepGradients, StepRunner
from mlxtune.backend.workers.group import Workers
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.evaluation.evaluation import perplexity
from mlxtune.core.objectives.objective import Objective
from mlxtune.core.run.metrics import InstructBatchResult
from mlxtune.core.steps.batch import MicroBatch, predicted_tokens, rows_of
from mlxtune.core.steps.pack import Pack
from mlxtune.errors import NonFiniteLossError


class StepBuilder:
    """Builds graphs of steps for `runner` to compute, and applies the updates of the steps.

    With several `workers`, each worker builds its share of a step, and the graph sums the shares.
    """

    def __init__(
        self,
        forward: Forward,
        runner: StepRunner,
        phases: Phases,
        vectors: LoRAVectors,
        optimizer: LoRAOptimizer,
        *,
        config: InstructConfig,
        lora: LoRASummary,
        workers: Workers,
        objective: Objective,
        losses: ExampleLosses,
    ) -> None:
        self.objective = objective
        self._losses = losses
        self.trained = forward.trained
        self._forward = forward
        self._runner = runner
        self._phases = phases
        self._vectors = vectors
        self._optimizer = optimizer
        self._config = config
        self._lora = lora
        self._workers = workers
        # The number of the last applied step.
        self.steps = 0

    def build(
        self,
        examples: Sequence[Example],
        step: int,
        rate: float | None = None,
        after: Update | None = None,
    ) -> StepGradients:
        """Return the loss and gradients of a step and, given a learning `rate`, its update.

        If `after` is given, the step starts from that update, which may still be running. `step`
        seeds the dropout.
        """
        forward, runner = self._forward, self._runner
        own = self.trained.values()
        vectors = self._optimizer.vectors(own, after)
        if not forward.model.training:
            forward.model.train()
        parameters = self._vectors.matrices_of_step(vectors)
        preference, answers = self._preference(examples, step), training_examples(examples)
        places, tokens = self._own_places(answers), count_tokens(answers)
        own_examples = [answers[i] for i in places]
        zero = mx.array(0.0)
        total = StepGradients(zero, None, tokens, Graph(0, 1, [], {}, zero), preference=preference)
        if preference is not None:
            total.logps = mx.zeros(len(answers))
        compute = self._phases.gradients if self._phases.timer else forward.gradients
        try:
            for group, batch in runner.batches.of(own_examples):
                if total.micro_batches:
                    # The device computes the previous micro-batch while this one is prepared.
                    runner.start(total.graph)
                inputs, scale = self.inputs(batch, step), mx.array(forward.loss_scale / tokens)
                reduce = summed
                if preference is not None:
                    members = [places[i] for i in group.examples]
                    reduce = preference.reduce(members, batch)
                    scale = mx.array(forward.loss_scale)
                self._phases.end("data", inputs.arrays)
                runner.note_outputs(group.tokens)
                # NumPy need not warn: `commit` reports a loss that is not finite.
                with np.errstate(all="ignore"):
                    values, part_gradients = compute(parameters, inputs, scale, reduce)
                part, *logps = values
                if preference is not None:
                    total.logps = total.logps.at[mx.array(members)].add(logps[0])
                total.add(part, self._vectors.join_gradients(part_gradients))
                total.graph = runner.graph(
                    group.tokens, part_gradients, total.loss, total.gradients, total.logps
                )
                total.micro_batches += 1
                total.run_tokens += group.tokens
                total.padding += group.padding(own_examples)
                memory.relieve_pressure()
        finally:
            # Tracing has replaced the model's parameters with arrays of the trace.
            self.trained.assign(own)
        self._finish(total, vectors)
        if rate is not None:
            update = self._optimizer.update(vectors, total.gradients, total.loss, rate, after)
            # The whole step is evaluated together, with one wait for the device.
            computed = total.loss, total.counts, total.logps, update
            total.graph = replace(total.graph, arrays=computed)
            total.update = update
        return total

    def _preference(self, examples: Sequence[Example], step: int) -> PreferenceStep | None:
        """Return the step's preference loss; None if the objective is cross-entropy."""
        if self.objective.is_sft:
            return None
        is_split = partial(self._splits_rows, examples)
        return prepare(self.objective, examples, is_split, partial(self._logps, step=step))

    def commit(
        self, examples: Sequence[Example], step: int, rate: float, computed: StepGradients
    ) -> InstructBatchResult | NonFiniteLossError:
        """Apply an update to the model and the optimizer; return the step's result or its error."""
        update = computed.update
        assert update is not None
        metrics: dict[str, float] = {}
        if (preference := computed.preference) is not None:
            logps = np.array(computed.logps, dtype=np.float64)
            metrics = preference.metrics(logps)
            if step == 1 and not self._config.dropout:
                dtype = self._forward.dtype
                preference.check_first_loss(logps, in_16_bits=dtype is not None and dtype.size == 2)
        self._runner.warn_of_limit()
        self.trained.assign(update.parameters)
        self._optimizer.commit(update)
        memory.relieve_pressure()
        self._phases.end("optimizer")
        loss, grad_norm = float(computed.loss), float(update.norm)
        examples = training_examples(examples)
        counts = [computed.micro_batches, computed.run_tokens, computed.padding]
        if computed.counts is not None:
            *counts, stop, save = map(round, computed.counts.tolist())
            self._workers.agree((stop, save))
        if not update.finite:
            return NonFiniteLossError(_describe_non_finite(step, rate, loss, grad_norm))
        self.steps = step
        return InstructBatchResult(
            avg_loss=loss,
            total_response_tokens=computed.tokens,
            perplexity=perplexity(loss),
            grad_norm=grad_norm,
            total_tokens=sum(map(len, examples)),
            memory=memory.last_peak_bytes(),
            micro_batches=counts[0],
            run_tokens=counts[1],
            padding=counts[2],
            metrics=metrics,
        )

    def share(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Return the examples of a step whose gradients this worker computes."""
        examples = training_examples(examples)
        return [examples[i] for i in self._own_places(examples)]

    def _own_places(self, examples: Sequence[Example]) -> list[int]:
        """Return the indices of this worker's examples; rows of preference data stay whole."""
        if self._workers.size == 1:
            return list(range(len(examples)))
        costs = self._forward.facts.costs(examples)
        if self.objective.is_sft:
            return self._workers.share(costs)
        rows = rows_of(examples)
        mine = self._workers.share([sum(costs[i] for i in row) for row in rows])
        return sorted(i for row in mine for i in rows[row])

    def can_build_ahead(self) -> bool:
        """Return whether a step can be built before the previous step is computed.

        A preference step cannot be built ahead if its loss needs log-probabilities first, or if
        there are several workers, which must agree.
        """
        objective = self.objective
        prepares = objective.needs_kl or objective.is_across_rows or self._workers.size > 1
        return objective.is_sft or not prepares

    def _splits_rows(self, examples: Sequence[Example]) -> bool:
        """Return whether any worker splits a row over several micro-batches."""
        own, batches = self.share(examples), self._runner.batches
        groups = [group.examples for group in batches.plan(own)]
        found = np.zeros(self._workers.size)
        found[self._workers.index] = splits_rows(own, groups)
        return bool(self._workers.merge(found).any())

    def _logps(self, examples: Sequence[Example], step: int) -> npt.NDArray[np.float64]:
        """Return examples' log-probabilities (E,) over all workers, with the step's dropout."""
        return -self._losses.of(examples, keys=partial(self._keys, step))

    def inputs(self, batch: MicroBatch | Pack, step: int) -> StepInputs:
        """Return the model's inputs for a micro-batch, with the step's dropout keys."""
        return self._forward.inputs(batch, self._keys(step, batch))

    def _keys(self, step: int, batch: MicroBatch | Pack) -> mx.array | None:
        keyed = self._config.dropout and self._forward.model.training
        return step_keys(self._config.seed, step, batch.rows) if keyed else None

    def _finish(self, total: StepGradients, vectors: list[mx.array]) -> None:
        """Undo float16's loss scale, and add the other workers' shares."""
        loss_scale = self._forward.loss_scale
        if total.gradients is None:  # if workers outnumber the examples
            total.gradients = tree_map(mx.zeros_like, vectors)
        if loss_scale != 1:
            total.loss, total.gradients = tree_map(
                lambda each: each / loss_scale, (total.loss, total.gradients)
            )
        if self._workers.size > 1:
            total.loss, total.gradients, total.counts = self._sum_over_workers(total)
            if total.preference is not None:
                total.logps = self._workers.sum_own(total.logps)
            arrays = total.loss, total.gradients, total.counts, total.logps
            total.graph = replace(total.graph, arrays=arrays)
        if total.preference is not None and (loss := total.preference.known_loss) is not None:
            total.loss = mx.array(loss)

    def _sum_over_workers(self, total: StepGradients) -> list[Any]:
        counts = [total.micro_batches, total.run_tokens, total.padding]
        if not self._workers.split_model:
            return self._workers.sum_step(total.loss, total.gradients, counts, ())
        # Sums by name, because the gradients that all workers compute (`alike`) count only once.
        named = self._vectors.split(total.gradients)
        alike = self._lora.alike
        loss, named, counts = self._workers.sum_step(total.loss, named, counts, alike)
        return [loss, self._vectors.join(named), counts]


def count_tokens(examples: Sequence[Example]) -> int:
    """Return the number of predicted supervised tokens. Raises ValueError if it is 0."""
    if tokens := sum(map(predicted_tokens, examples)):
        return tokens
    raise ValueError(
        "no example has a supervised token after its first token: nothing is predicted"
    )


def _describe_non_finite(step: int, rate: float, loss: float, grad_norm: float) -> str:
    """Return the reason why a step was not applied, and a remedy."""
    at = f"at learning rate {rate:g}"
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return (
            f"step {step}: the adapter would not be finite after a step {at}; "
            "the step was not applied: lower --lr"
        )
    what = f"gradient norm is {grad_norm}" if math.isfinite(loss) else f"loss is {loss}"
    return (
        f"step {step}: the {what} {at}; the step was not applied: "
        "lower --lr, or use --dtype float32"
    )
