"""InstructPipeline: one optimizer step at a time, and evaluation."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlxtune.backend.adapters import checkpoints, initialise
from mlxtune.backend.device import memory
from mlxtune.backend.forward.forward import Forward
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.lora.apply import LoRASummary, apply_lora
from mlxtune.backend.lora.layers import step_keys
from mlxtune.backend.lora.optimizer import LoRAOptimizer, Update
from mlxtune.backend.lora.vectors import LoRAVectors
from mlxtune.backend.step.evaluator import ExampleLosses
from mlxtune.backend.step.micro_batches import MicroBatches
from mlxtune.backend.step.pending import (
    PendingStep,
    Started,
    StepGradients,
    describe_non_finite,
)
from mlxtune.backend.step.stages import Graph, Phases, Stages
from mlxtune.backend.workers.group import ALONE, Workers
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.files.files import make_folder
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.core.run.metrics import InstructBatchResult, InstructStepResult, perplexity
from mlxtune.core.steps.batch import MicroBatch, predicted_tokens
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.groups import Group
from mlxtune.core.steps.pack import Pack
from mlxtune.errors import ModelError, NonFiniteLossError


class InstructPipeline:
    """A model with LoRA on it, and AdamW over the LoRA matrices.

    Applies LoRA to `model`, an mlx-lm model, which stays frozen otherwise. `execution` changes
    neither loss nor gradient; its micro-batches are halved, and `warn` called, where memory runs
    out. Written adapters record `base_model` and `base_quantization`, how it was quantised while
    loading. Unless `fresh`, LoRA gets its values from `restore`. `provenance` returns further
    entries of a checkpoint's metadata. With several `workers`, each has a pipeline that is given
    the same steps, and computes its share of their examples.

    Raises ModelError when a target matches nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        config: InstructConfig,
        *,
        execution: Execution | None = None,
        base_model: str = "",
        base_quantization: Mapping[str, Any] | None = None,
        fresh: bool = True,
        provenance: Callable[[], Mapping[str, Any]] = dict,
        warn: Callable[[str], None] = warnings.warn,
        workers: Workers = ALONE,
    ) -> None:
        self.model = model
        self.config = config
        self.lora: LoRASummary = apply_lora(model, config)
        execution = execution or best_execution(self.lora.total_parameters)
        self.forward = Forward(model, self.lora.dropout_keys, execution)
        self._micro_batches = MicroBatches(
            self.forward,
            keyed=config.dropout > 0,
            remedy="lower --max-seq-len, set --grad-checkpoint on, or use --quantize 4 or "
            "fewer --num-layers",
            warn=warn,
            shorten=lambda: self._stages.shorten(),
            run_alike=workers.split_model,
        )
        parameters = self.lora.total_parameters
        self._stages = Stages(self.forward.mixers, parameters)
        self._workers = workers
        self._losses = ExampleLosses(
            self.forward,
            self._micro_batches,
            self._stages,
            parameters,
            workers,
            # AdamW's two moments, in float32.
            held=2 * 4 * self.lora.trainable_parameters,
        )
        self._base = base_model, base_quantization
        self._provenance = provenance
        # SHA-256 of the adapter that LoRA started from, if it did.
        self.initial_hash = initialise.initialise(model, self.lora) if fresh else None
        self.vectors = LoRAVectors(model, apart=config.lr_ratio != 1)
        self._optimizer = LoRAOptimizer(self.vectors, model.trainable_parameters(), config)
        if fresh:
            self._adopt()
        self.phases = Phases(self.forward)
        self._steps = 0
        self._pending: PendingStep | None = None

    @property
    def micro_batch_tokens(self) -> int:
        """The bound of a micro-batch, which is halved when memory runs short."""
        return self._micro_batches.max_tokens

    @micro_batch_tokens.setter
    def micro_batch_tokens(self, tokens: int) -> None:
        self._micro_batches.max_tokens = tokens

    def run_as(self, execution: Execution) -> None:
        """Compute steps from here on with the micro-batches and the memory of an execution."""
        self.forward.execution = replace(self.forward.execution, loss_chunk=execution.loss_chunk)
        self.forward.recompute(execution.recompute)
        self.micro_batch_tokens = execution.micro_batch_tokens

    def release_cache(self) -> None:
        """Give back memory that MLX keeps for later arrays."""
        mx.clear_cache()

    def halve_micro_batches(self, examples: Sequence[Example]) -> int | None:
        """Halve the bound of a micro-batch, from the largest of a step on these examples.

        Return it; None, and change nothing, if each is one example, or workers share the model.
        """
        halved = self._micro_batches.halve(self._share(examples))
        return self.micro_batch_tokens if halved else None

    def limit_evaluation(self, most: int) -> None:
        """Evaluate in batches that keep the peak below this many bytes, if those of training do."""
        self._losses.limit_memory(most)

    @property
    def learning_rate(self) -> float:
        """The rate of a step that is given none."""
        return self.config.learning_rate

    def train_step(self, example: Example) -> InstructStepResult:
        """Take one optimizer step on one example, at the config's learning rate."""
        result = self.train_batch([example])
        return InstructStepResult(result.avg_loss, result.total_response_tokens, result.perplexity)

    def train_batch(
        self,
        examples: Sequence[Example],
        *,
        step: int | None = None,
        learning_rate: float | None = None,
    ) -> InstructBatchResult:
        """Take one optimizer step on all examples together.

        The loss is the sum over their supervised tokens divided by the count of these, however
        the examples are split into micro-batches. `step` counts from 1 and keys the randomness;
        `learning_rate` defaults to the config's.

        Raises NonFiniteLossError, and changes nothing, when loss or gradient is not finite.
        """
        return self.start_batch(examples, step=step, learning_rate=learning_rate).result()

    def start_batch(
        self,
        examples: Sequence[Example],
        *,
        step: int | None = None,
        learning_rate: float | None = None,
    ) -> PendingStep:
        """Start the step that `train_batch` takes; its `result` waits for it.

        The graph is built while the device computes the step before, which is waited for.
        """
        before = self._pending
        if step is None:
            step = self._steps + (1 if before is None else 2)
        rate = self.learning_rate if learning_rate is None else learning_rate
        pending = PendingStep(
            self._stages,
            partial(self._build, examples, step, rate),
            partial(self._micro_batches.run, self._share(examples)),
            partial(self._commit, examples, step, rate),
        )
        built = None
        if before is not None:
            # Several micro-batches hide the host's work behind each other.
            ahead = self.forward.execution.operations.lazy and not self.phases.timer
            if ahead and before.update and self._micro_batches.is_one(self._share(examples)):
                built = self._build(examples, step, rate, before.update)
            if not before.finish():
                built = None
        memory.start_peak()
        pending.start(built)
        self._pending = pending
        return pending

    def _build(
        self, examples: Sequence[Example], step: int, rate: float, after: Update | None = None
    ) -> Started:
        """Return the graph of a step, to start from an update that is being computed."""
        vectors = self._optimizer.vectors(self.model.trainable_parameters(), after)
        found = self._accumulate(examples, step, vectors)
        update = self._optimizer.update(vectors, found.gradients, found.loss, rate, after)
        # All of the step at once: one wait for the device.
        found.graph = replace(found.graph, arrays=(found.loss, found.counts, update))
        return found, update

    def _commit(
        self, examples: Sequence[Example], step: int, rate: float, computed: Started
    ) -> InstructBatchResult | NonFiniteLossError:
        """Make an update the state of model and optimizer; return what the step's result is."""
        result, update = computed
        self._pending = None
        self._micro_batches.warn_of_limit()
        self.model.update(update.parameters)
        self._optimizer.commit(update)
        memory.relieve_pressure()
        self.phases.end("optimizer")
        loss, grad_norm = float(result.loss), float(update.norm)
        counts = [result.micro_batches, result.run_tokens, result.padding]
        if result.counts is not None:
            *counts, stop, save = map(round, result.counts.tolist())
            self._workers.agree((stop, save))
        if not update.finite:
            return NonFiniteLossError(describe_non_finite(step, rate, loss, grad_norm))
        self._steps = step
        return InstructBatchResult(
            avg_loss=loss,
            total_response_tokens=result.tokens,
            perplexity=perplexity(loss),
            grad_norm=grad_norm,
            total_tokens=sum(map(len, examples)),
            memory=memory.last_peak_bytes(),
            micro_batches=counts[0],
            run_tokens=counts[1],
            padding=counts[2],
        )

    def _adopt(self) -> None:
        """Have the model's parameters be parts of the optimizer's vectors from the start."""
        self.model.update(self._optimizer.adopt(self.model.trainable_parameters()))

    def _settle(self) -> None:
        """Wait for a step that was started."""
        if self._pending is not None:
            self._pending.finish()

    def loss_and_gradients(self, examples: Sequence[Example], step: int = 1) -> StepGradients:
        """Return loss and gradients of a step; `step` keys the dropout, nothing is updated."""
        self._settle()

        def compute() -> StepGradients:
            vectors = self._optimizer.vectors(self.model.trainable_parameters())
            found = self._accumulate(examples, step, vectors)
            self._stages.finish(found.graph)
            found.loss, found.gradients = float(found.loss), self.vectors.split(found.gradients)
            return found

        return self._micro_batches.run(self._share(examples), compute)

    def _accumulate(
        self, examples: Sequence[Example], step: int, vectors: list[mx.array]
    ) -> StepGradients:
        """Return loss and gradients, as vectors, of a step from the LoRA matrices in vectors."""
        self.model.train()
        own = self.model.trainable_parameters()
        parameters = self.vectors.matrices_of_step(vectors)
        tokens, examples = _count_tokens(examples), self._share(examples)
        micro_batches = run_tokens = padding = 0
        loss, grads = mx.array(0.0), None
        compute = self.phases.gradients if self.phases.timer else self.forward.gradients
        raised = self.forward.raised
        graph: Graph | None = None
        try:
            for group, batch in self.micro_batches(examples):
                if graph is not None:
                    # The device works on the one before while this one is prepared.
                    self._stages.start(graph)
                arrays, scale = self.arrays(batch, step), mx.array(raised / tokens)
                self.phases.end("data", arrays)
                self._stages.record(group.tokens)
                # A loss that is not finite is reported as such.
                with np.errstate(all="ignore"):
                    part, part_grads = compute(parameters, arrays, scale)
                loss = loss + part
                joined = self.vectors.join_gradients(part_grads)
                grads = joined if grads is None else tree_map(mx.add, grads, joined)
                graph = self._stages.graph(group.tokens, part_grads, loss, grads)
                micro_batches += 1
                run_tokens += group.tokens
                padding += group.padding(examples)
                memory.relieve_pressure()
        finally:
            # Tracing left its own arrays in the model.
            self.model.update(own)
        if grads is None:  # with more workers than examples
            grads = tree_map(mx.zeros_like, vectors)
        if raised != 1:
            loss, grads = tree_map(lambda each: each / raised, (loss, grads))
        graph, counts = graph or self._stages.graph(0, {}, loss), None
        if self._workers.size > 1:
            counts = [micro_batches, run_tokens, padding]
            loss, grads, counts = self._sum_over_workers(loss, grads, counts)
            graph = replace(graph, arrays=(loss, grads, counts))
        return StepGradients(loss, grads, tokens, micro_batches, run_tokens, padding, graph, counts)

    def _sum_over_workers(
        self, loss: mx.array, gradients: list[mx.array], counts: list[int]
    ) -> list[Any]:
        if not self._workers.split_model:
            return self._workers.sum_step(loss, gradients, counts, ())
        # By name: not all of them are weighed alike.
        named = self.vectors.split(gradients)
        loss, named, counts = self._workers.sum_step(loss, named, counts, self.lora.alike)
        return [loss, self.vectors.join(named), counts]

    def _share(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Return the examples of a step that this worker computes."""
        if self._workers.size == 1:
            return examples
        return [examples[i] for i in self._workers.share(self.forward.costs.of(examples))]

    def evaluate(
        self, examples: Sequence[Example], on_progress: Callable[[int], None] = lambda done: None
    ) -> InstructBatchResult:
        """Return the loss over all supervised tokens of the examples.

        `on_progress` gets the number of examples done; what it raises ends the evaluation.
        """
        self._settle()
        self.model.eval()
        tokens, total = _count_tokens(examples), sum(map(len, examples))
        loss = float(self._losses.of(examples, on_progress).sum()) / tokens
        return InstructBatchResult(loss, tokens, perplexity(loss), total_tokens=total)

    def write(self, weights: Path) -> None:
        """Write the adapter file, and adapter_config.json beside it. Raises OutputError."""
        make_folder(weights.parent)
        checkpoints.adapter_writer(self.model, self.lora, *self._base)(weights)

    def save(self, folder: Path) -> None:
        """Write into a folder what `load` and `restore` read. Raises OutputError."""
        self.snapshot()(folder)

    def snapshot(self) -> Callable[[Path], None]:
        """Return what writes the adapter, as mlx-lm loads it, and the optimizer into a folder.

        It writes what is now, whenever it is called, and raises OutputError.
        """
        self._settle()
        self._workers.check_same(self.model.trainable_parameters(), self._steps)
        settings = {"step": self._steps, "micro_batch_tokens": self.micro_batch_tokens}
        adapter = checkpoints.adapter_writer(self.model, self.lora, *self._base)
        parameters = checkpoints.parameters_writer(self.model, self.lora)
        optimizer = checkpoints.optimizer_writer(self._optimizer.state_for_file(), settings)

        def write(folder: Path) -> None:
            adapter(folder / ADAPTER)
            parameters(folder)
            optimizer(folder / checkpoints.OPTIMIZER)

        return write

    def load(self, folder: Path) -> None:
        """Read back the adapter of a snapshot. Raises ModelError when it does not fit."""
        self._settle()
        checkpoints.read_parameters(folder, self.model, self.lora)
        self._adopt()

    def take_first(self) -> None:
        """Take the adapter of worker 0."""
        self._settle()
        self.model.update(self._workers.from_first(self.model.trainable_parameters()))
        self._adopt()

    def restore(self, folder: Path) -> None:
        """Resume from a snapshot as if the run had not stopped.

        Raises ModelError when it does not fit.
        """
        path = folder / checkpoints.OPTIMIZER
        state, settings = checkpoints.read_optimizer(path, self._optimizer.state)
        tokens, steps = settings.get("micro_batch_tokens", 0), settings.get("step", -1)
        if tokens < 1 or steps < 0:
            raise ModelError(f"{path}: has no step or micro-batch size")
        self.load(folder)
        self._optimizer.take_from_file(state)
        # What was halved since the plan stays halved; what the plan gives less is for less memory.
        self.micro_batch_tokens, self._steps = min(tokens, self.micro_batch_tokens), steps

    def describe(self) -> Mapping[str, Any]:
        """Return what a checkpoint says of the adapter and the versions that made it."""
        return {
            "lora_rank": self.config.lora_rank,
            "lora_alpha": self.config.lora_alpha,
            "targets": list(self.config.targets),
            "workers": self._workers.describe(),
            **({"init_adapter_hash": self.initial_hash} if self.initial_hash else {}),
            **self._provenance(),
        }

    def arrays(self, batch: MicroBatch | Pack, step: int) -> dict[str, Any]:
        """Return a micro-batch of a step as the model takes it, its dropout keyed by the step."""
        keyed = self.config.dropout and self.model.training
        keys = step_keys(self.config.seed, step, batch.rows) if keyed else None
        return self.forward.arrays(batch, keys)

    def micro_batches(
        self, examples: Sequence[Example]
    ) -> Iterator[tuple[Group, MicroBatch | Pack]]:
        """Yield the micro-batches of a step: which examples, and their arrays."""
        return self._micro_batches.of(examples)


def _count_tokens(examples: Sequence[Example]) -> int:
    """Return how many supervised tokens are predicted. Raises ValueError if none is."""
    if tokens := sum(map(predicted_tokens, examples)):
        return tokens
    raise ValueError("no example has a supervised token after its first: nothing is predicted")
