"""The engine: takes optimizer steps, each built, launched and committed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxtune.backend.device import allocator
from mlxtune.backend.device.retry import Attempt
from mlxtune.backend.forward.forward import Forward, StepInputs
from mlxtune.backend.lora.apply import LoRASummary
from mlxtune.backend.lora.lora_layers import step_keys
from mlxtune.backend.lora.optimizer import LoRAOptimizer
from mlxtune.backend.lora.vectors import LoRAVectorLayout
from mlxtune.backend.step.evaluator import passes_of
from mlxtune.backend.step.micro_batches import MicroBatches
from mlxtune.backend.step.optimizer_step import OptimizerStep, StepGradients
from mlxtune.backend.step.phases import Phases
from mlxtune.backend.step.step_loss import (
    PolicyLoss,
    StepLoss,
    divides_rows,
    preference_loss,
    sft_loss,
)
from mlxtune.backend.workers.workers import Workers
from mlxtune.core.data.encode import Example, StepExamples
from mlxtune.core.evaluation.outcome import perplexity
from mlxtune.core.objectives.policy import PolicyObjective, StepObjective
from mlxtune.core.run.metrics import InstructBatchResult
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_terms import BatchLoad, moment_bytes
from mlxtune.core.steps.micro_batch import PaddedBatch, rows_of
from mlxtune.core.steps.pack import Pack, StepLengths
from mlxtune.core.training.pipeline import StepOutcome
from mlxtune.core.training.requests import NO_REQUESTS, Requests

# The remedy that an error names if memory is too small for one example.
_MEMORY_REMEDY = (
    "lower --max-seq-len or --num-layers, set --grad-checkpoint on, or use --quantize 4"
)


class Engine:
    """Takes the optimizer steps of one model, which go through three states:

        built      the graph of loss, gradients and update exists; nothing is computed
        launched   the device computes the graph, while the host may build the next step
        committed  model and optimizer have the update

    The host builds a step while the device computes the previous one, if it can be built ahead:

        host     build 1   launch 1   build 2   wait, commit 1   launch 2   build 3   wait, …
        device             compute 1 ........................    compute 2 ...............

    A fault of the GPU returns a launched step to its start: it is built and launched again. If a
    step has several micro-batches, the device computes one while the next is built. With several
    `workers`, each worker builds its part of a step, and the graph sums the parts.
    """

    def __init__(
        self,
        forward: Forward,
        lora: LoRASummary,
        *,
        objective: StepObjective,
        workers: Workers,
        warn: Callable[[str], None],
    ) -> None:
        self.forward = forward
        self.objective = objective
        self._lora = lora
        self._config = config = lora.config
        self._workers = workers
        self.runner, self.losses = passes_of(
            forward,
            lora.total_parameters,
            workers,
            remedy=_MEMORY_REMEDY,
            warn=warn,
            keyed=config.dropout > 0,
            whole_rows=objective.keeps_rows_whole,
            other_bytes=moment_bytes(lora.trainable_parameters),
        )
        self.phases = Phases(forward)
        self.vectors = LoRAVectorLayout(forward.model, separate=config.lr_ratio != 1)
        self.optimizer = LoRAOptimizer(self.vectors, forward.model.trainable_parameters(), config)
        # The launched step, if any, and the number of the last committed step.
        self.launched: OptimizerStep | None = None
        self.committed_steps = 0

    def run_as(
        self, execution: Execution, peak: int | None, fits: Callable[[BatchLoad], bool] | None
    ) -> None:
        """Use an execution from now on; see `InstructPipeline.run_as`."""
        self.forward.run_as(execution)
        execution = self.forward.execution
        self.losses.training = replace(self.micro_batches, execution=execution, fits=fits)
        if peak is not None:
            self.losses.limit_memory(peak)

    @property
    def micro_batches(self) -> MicroBatches:
        """The micro-batches of later steps, which evaluations also read: theirs are no smaller."""
        return self.losses.training

    def restore(self, state: dict[str, Any], steps: int, max_tokens: int) -> None:
        """Continue after `steps` steps, with the optimizer's `state` in a file's layout.

        A halved limit of the micro-batches stays halved, and a limit that is lower now, for less
        memory, stays lower.
        """
        self.optimizer.adopt(self.forward.model)
        self.optimizer.load_state(state)
        self.committed_steps = steps
        limit = min(max_tokens, self.micro_batches.max_tokens)
        self.losses.training = self.micro_batches.limited(limit)

    def halve(self, examples: Sequence[Example]) -> int | None:
        """Halve the limit of micro-batches in tokens, for a step's examples, and return it.

        Returns None if it cannot be halved, or if this worker must not do so on its own.
        """
        if not self.runner.retries:
            return None
        lengths = self.micro_batches.lengths(StepExamples.of(examples).training)
        return self._halve(lengths.only(self._own_indices(lengths)))

    def _halve(self, lengths: StepLengths) -> int | None:
        half = self.micro_batches.halved_limit(lengths)
        if half is not None:
            self.losses.training = self.micro_batches.limited(half)
        return half

    # The states of a step

    def start_batch(
        self,
        examples: Sequence[Example],
        number: int | None,
        learning_rate: float,
        requests: Requests,
    ) -> OptimizerStep:
        """Build and launch a step at a learning rate, and return it without waiting for it.

        If possible, the step is built while the device computes the previous step, which is
        committed before this step is launched.
        """
        step = self.new_step(examples, number, learning_rate, requests)
        if self._can_build_ahead(step):
            self.build(step, after=self.launched)
        if not self.commit_launched():
            # The update that this step starts from has been computed again.
            step.built = None
        allocator.start_peak()
        for attempt in self._attempts(step):
            with attempt:
                if step.built is None:
                    self.build(step)
        self.launch(step)
        return step

    def new_step(
        self,
        examples: Sequence[Example],
        number: int | None = None,
        learning_rate: float | None = None,
        requests: Requests = NO_REQUESTS,
    ) -> OptimizerStep:
        """Return a step that is not built; by default, its number follows the launched step's."""
        if number is None:
            number = self.committed_steps + (1 if self.launched is None else 2)
        step_examples = StepExamples.of(examples)
        lengths = self.micro_batches.lengths(step_examples.training)
        own = self._own_indices(lengths)
        return OptimizerStep(
            number,
            learning_rate,
            step_examples,
            all_lengths=lengths,
            own_indices=own,
            lengths=lengths.only(own),
            requests=requests,
        )

    def _can_build_ahead(self, step: OptimizerStep) -> bool:
        """Return whether a step can be built while the device computes the launched step.

        The step must have only one micro-batch, because several keep the device busy, and its loss
        must need neither log-probabilities first nor other workers' agreement.
        """
        if self.launched is None or self.launched.built is None or self.phases.timer:
            return False
        objective = self.objective
        agrees = objective.keeps_rows_whole and self._workers.world_size > 1
        if not self.forward.operations.lazy or objective.needs_first_pass or agrees:
            return False
        return self.micro_batches.fit_into_one(step.lengths)

    def _attempts(self, step: OptimizerStep) -> Iterator[Attempt]:
        """Yield a context for each attempt at work on a step; see `GraphRunner.attempts`."""
        return self.runner.attempts(step.lengths, self._halve)

    def build(self, step: OptimizerStep, after: OptimizerStep | None = None) -> None:
        """Build a step: the gradients of its micro-batches, then the update.

        Each micro-batch but the last is launched when the next is built. If `after` is given, the
        step starts from its update, which may still be running.
        """
        forward = self.forward
        before = None if after is None or after.built is None else after.built.update
        vectors = self.optimizer.vectors(forward.trained.values(), before)
        if not forward.model.training:
            forward.model.train()
        parameters = self.vectors.matrices_of_step(vectors)
        total = StepGradients(self._loss(step))
        compute = self.phases.gradients if self.phases.timer else forward.gradients
        own = [step.examples.training[i] for i in step.own_indices]
        for micro_batch, batch in self.micro_batches.iterate(own, step.lengths):
            if total.counts.micro_batches:
                # The device computes a micro-batch while the next one is built.
                self.runner.start(total.graph)
            inputs = self.inputs(batch, step.number)
            members = [step.own_indices[i] for i in micro_batch.examples]
            scale = mx.array(forward.loss_scale / total.step_loss.divisor)
            reduce = total.step_loss.reduce(members, batch.counts)
            outputs = self.runner.outputs_of_stages(micro_batch.tokens)
            # NumPy need not warn: the outcome reports a loss that is not finite.
            with np.errstate(all="ignore"):
                values, gradients = compute(parameters, inputs, scale, reduce, outputs)
            tokens, padding = micro_batch.tokens, micro_batch.padding(step.lengths.forward)
            total.add(values, self.vectors.join_gradients(gradients), tokens, padding)
            total.graph = self.runner.graph(tokens, outputs, gradients, *total.sums)
            allocator.clear_cache_near_limit()
        total.finish(vectors, forward.loss_scale)
        if self._workers.world_size > 1:
            self._sum_over_workers(total, step.requests)
        if step.learning_rate is not None:
            total.set_update(
                self.optimizer.update(
                    vectors, total.gradients, total.loss, step.learning_rate, before
                )
            )
        step.built, step.builds = total, step.builds + 1

    def launch(self, step: OptimizerStep) -> None:
        """Make the device compute a built step, without waiting for it."""
        assert step.built is not None
        # `_commit` handles errors, and tries again.
        with suppress(RuntimeError, MemoryError):
            self.runner.start(step.built.graph)
        self.launched = step

    def commit_launched(self) -> bool:
        """Commit the launched step, if any; return False if it had to be built again."""
        return self.launched is None or self._commit(self.launched)

    def wait(self, step: OptimizerStep) -> StepOutcome:
        """Commit a launched step, unless it is committed already; return its outcome."""
        if step.outcome is None:
            self._commit(step)
        assert step.outcome is not None
        return step.outcome

    def _commit(self, step: OptimizerStep) -> bool:
        """Wait for a launched step and apply it; return False if it had to be built again.

        Raises MemoryLimitError or GpuError if all attempts fail; the model is then unchanged.
        """
        builds = step.builds
        total = self._compute(step)
        self.launched = None
        step.outcome = self._apply(step, total)
        return step.builds == builds

    def gradients(self, step: OptimizerStep) -> StepGradients:
        """Compute a step that has no rate; its loss becomes a float, and its gradients a tree."""
        total = self._compute(step)
        total.read(self.vectors.matrices)
        return total

    def _compute(self, step: OptimizerStep) -> StepGradients:
        """Wait for a step's graph; build it if it is missing, and again after a fault."""
        for attempt in self._attempts(step):
            with attempt:
                total = self._compute_once(step)
        return total

    def _compute_once(self, step: OptimizerStep) -> StepGradients:
        if step.built is None:
            self.build(step)
        total = step.take_built()
        self.runner.finish(total.graph)
        return total

    def _apply(self, step: OptimizerStep, total: StepGradients) -> StepOutcome:
        """Apply an update to the model and the optimizer; return the step's outcome."""
        update, step_loss, dtype = total.update, total.step_loss, self.forward.dtype
        assert update is not None
        if step.number == 1 and not self._config.dropout:
            step_loss.check_first_loss(
                total.values, in_16_bits=dtype is not None and dtype.size == 2
            )
        metrics = step_loss.metrics(total.values)
        self.runner.warn_of_limit()
        self.forward.trained.assign(update.parameters)
        self.optimizer.commit(update)
        allocator.clear_cache_near_limit()
        self.phases.end("optimizer")
        loss = float(total.loss)
        grad_norm = float(update.norm)
        counts = total.all_counts()
        if not update.finite:
            problem = step.not_finite(loss, grad_norm)
            return StepOutcome(problem, step.started, time.perf_counter(), counts.requests)
        self.committed_steps = step.number
        result = InstructBatchResult(
            avg_loss=loss,
            total_response_tokens=step_loss.tokens,
            perplexity=perplexity(loss),
            grad_norm=grad_norm,
            total_tokens=step_loss.total_tokens,
            memory=allocator.last_peak_bytes(),
            micro_batches=counts.micro_batches,
            run_tokens=counts.forward_tokens,
            padding=counts.padding,
            metrics=metrics,
        )
        return StepOutcome(result, step.started, time.perf_counter(), counts.requests)

    # The parts of a step

    def inputs(self, batch: PaddedBatch | Pack, number: int) -> StepInputs:
        """Return the model's inputs for a micro-batch, with the dropout keys of step `number`."""
        return self.forward.inputs(batch, self._dropout_keys(number, batch))

    def _dropout_keys(self, number: int, batch: PaddedBatch | Pack) -> mx.array | None:
        keyed = self._config.dropout and self.forward.model.training
        return step_keys(self._config.seed, number, batch.row_ids) if keyed else None

    def _loss(self, step: OptimizerStep) -> StepLoss:
        """Return a step's loss, after the forward passes that must come first."""
        objective = self.objective
        if isinstance(objective, PolicyObjective):
            return PolicyLoss.of(objective, step.examples)
        if objective.is_sft:
            return sft_loss(step.all_lengths)
        logps_of = partial(self._logps, number=step.number)
        is_divided = self._divides_rows(step)
        return preference_loss(objective, step.examples, logps_of, is_divided=is_divided)

    def _logps(self, examples: Sequence[Example], number: int) -> npt.NDArray[np.float64]:
        """Return examples' log-probabilities (E,) over all workers, with a step's dropout."""
        return -self.losses.compute(examples, keys=partial(self._dropout_keys, number))

    def _divides_rows(self, step: OptimizerStep) -> bool:
        """Return whether any worker cuts a row into several micro-batches."""
        divided = [micro_batch.examples for micro_batch in self.micro_batches.divided(step.lengths)]
        divides = np.zeros(self._workers.world_size)
        divides[self._workers.rank] = divides_rows(step.lengths.row_ids, divided)
        return bool(self._workers.merge(divides).any())

    # Workers

    def _own_indices(self, lengths: StepLengths) -> list[int]:
        """Return the indices of this worker's examples; rows may have to stay whole."""
        if self._workers.world_size == 1:
            return list(range(len(lengths)))
        costs = self.forward.facts.costs(lengths.forward, lengths.supervised)
        if not self.objective.keeps_rows_whole:
            return self._workers.own_items(costs)
        rows = rows_of(lengths.row_ids)
        mine = self._workers.own_items([sum(costs[i] for i in row) for row in rows])
        return sorted(i for row in mine for i in rows[row])

    def _sum_over_workers(self, total: StepGradients, requests: Requests) -> None:
        """Add the other workers' sums, and their requests, to this worker's."""
        workers, own = self._workers, total.counts.requesting(requests)
        if workers.shards_model:
            # By name, because the gradients that all workers compute (`replicated`) count only
            # once.
            named = self.vectors.matrices(total.gradients)
            replicated = self._lora.replicated
            loss, named, counts = workers.sum_step(total.loss, named, own, replicated)
            gradients = self.vectors.join(named)
        else:
            loss, gradients, counts = workers.sum_step(total.loss, total.gradients, own)
        total.merge(loss, gradients, counts, [workers.sum_own(value) for value in total.values])
