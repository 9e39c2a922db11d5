"""InstructPipeline: one optimizer step at a time, and evaluation."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.adapters import checkpoint_tensors, initialise
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.device import memory
from mlxtune.backend.device.retry import retried, tries
from mlxtune.backend.forward.forward import Forward
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.lora.apply import LoRASummary, apply_lora
from mlxtune.backend.lora.optimizer import LoRAOptimizer
from mlxtune.backend.lora.vectors import LoRAVectors
from mlxtune.backend.objectives.preference_step import training_examples
from mlxtune.backend.step.builder import StepBuilder, count_tokens
from mlxtune.backend.step.evaluator import ExampleLosses
from mlxtune.backend.step.micro_batches import MicroBatches
from mlxtune.backend.step.phases import Phases
from mlxtune.backend.step.runner import PendingStep, StepGradients, StepRunner
from mlxtune.backend.workers.group import ALONE, Workers
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.evaluation.evaluation import perplexity
from mlxtune.core.files.files import make_folder
from mlxtune.core.objectives.objective import SFT, Objective
from mlxtune.core.run.checkpoint import ADAPTER, OPTIMIZER
from mlxtune.core.run.metrics import InstructBatchResult, InstructStepResult
from mlxtune.core.steps.execution import Execution
from mlxtune.errors import ModelError

# The remedy that an error names if memory is too small for one example.
_LESS_MEMORY = "lower --max-seq-len or --num-layers, set --grad-checkpoint on, or use --quantize 4"


class InstructPipeline:
    """A model with LoRA on it, and AdamW over the LoRA matrices.

    Applies LoRA to `model`, an mlx-lm model whose own weights stay frozen. `execution` changes
    neither loss nor gradient; its micro-batches are halved, and `warn` is called, when memory runs
    out. Written adapters record `base_model` and the entries of `base_record`. If `fresh`,
    LoRA may start from an adapter, which is `initial` if it is open. Otherwise, LoRA gets its
    values from `restore`, and the argument `initial_hash` gives the SHA-256 of any adapter that the
    run started from. `provenance` returns further entries for a checkpoint's metadata. A
    step minimises `objective`. With several `workers`, each worker's pipeline takes the same steps,
    and computes its share of the examples.

    Raises ModelError if LoRA cannot be applied.
    """

    def __init__(
        self,
        model: nn.Module,
        config: InstructConfig,
        *,
        execution: Execution | None = None,
        base_model: str = "",
        base_record: Mapping[str, Any] | None = None,
        fresh: bool = True,
        initial: AdapterFile | None = None,
        initial_hash: str | None = None,
        provenance: Callable[[], Mapping[str, Any]] = dict,
        warn: Callable[[str], None] = warnings.warn,
        workers: Workers = ALONE,
        objective: Objective = SFT,
    ) -> None:
        self.objective = objective
        self.model = model
        self.config = config
        # The default learning rate of a step.
        self.learning_rate = config.learning_rate
        self.lora: LoRASummary = apply_lora(model, config)
        parameters = self.lora.total_parameters
        execution = execution or best_execution(parameters, model=model)
        self.forward = Forward(model, self.lora.dropout_keys, execution)
        self.batches = MicroBatches(
            self.forward,
            execution.micro_batch_tokens,
            keyed=config.dropout > 0,
            run_alike=workers.split_model,
            whole_rows=not objective.is_sft,
        )
        self.runner = StepRunner(
            self.forward, self.batches, parameters, remedy=_LESS_MEMORY, warn=warn
        )
        # AdamW's two moments, in float32.
        moments = 2 * 4 * self.lora.trainable_parameters
        self.losses = ExampleLosses(
            self.forward, self.batches, self.runner, parameters, workers, held=moments
        )
        self._workers = workers
        self._base = base_model, base_record
        self._provenance = provenance
        self.initial_hash = (
            initialise.initialise(model, self.lora, initial) if fresh else initial_hash
        )
        self.vectors = LoRAVectors(model, apart=config.lr_ratio != 1)
        self._optimizer = LoRAOptimizer(self.vectors, model.trainable_parameters(), config)
        if fresh:
            self._optimizer.adopt(model)
        self.phases = Phases(self.forward)
        self.builder = StepBuilder(
            self.forward,
            self.runner,
            self.phases,
            self.vectors,
            self._optimizer,
            config=config,
            lora=self.lora,
            workers=workers,
            objective=objective,
            losses=self.losses,
        )

    def run_as(self, execution: Execution) -> None:
        """Use an execution's micro-batch size, loss chunks and recomputation from now on."""
        self.forward.execution = replace(self.forward.execution, loss_chunk=execution.loss_chunk)
        self.forward.recompute(execution.recompute)
        self.batches.limit(execution.micro_batch_tokens)

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

        The loss is the objective's, by default the mean over all supervised tokens, however the
        examples are split into micro-batches. `step` counts from 1 and seeds the dropout;
        `learning_rate` defaults to the config's.

        Raises NonFiniteLossError, and changes nothing, if a number of the step is not finite.
        """
        return self.start_batch(examples, step=step, learning_rate=learning_rate).result()

    def start_batch(
        self,
        examples: Sequence[Example],
        *,
        step: int | None = None,
        learning_rate: float | None = None,
    ) -> PendingStep:
        """Start the step that `train_batch` takes, and return it while it runs.

        If possible, builds the step's graph while the device still computes the previous step.
        """
        before, share, built = self.runner.pending, self.builder.share(examples), None
        if step is None:
            step = self.builder.steps + (1 if before is None else 2)
        rate = self.learning_rate if learning_rate is None else learning_rate
        build = partial(self.builder.build, examples, step, rate)
        if before is not None:
            # Only a step of one micro-batch is built ahead: several micro-batches keep the device
            # busy.
            ahead = self.forward.execution.operations.lazy and not self.phases.timer
            ahead = ahead and self.builder.can_build_ahead()
            if ahead and before.step and self.batches.is_one(share):
                built = build(before.step.update)
            if not before.finish():
                built = None
        memory.start_peak()
        for attempt in tries(partial(self.runner.adapt, self.batches, share)):
            with attempt:
                started = built or build()
        return self.runner.launch(
            started, build, partial(self.builder.commit, examples, step, rate), share
        )

    def loss_and_gradients(self, examples: Sequence[Example], step: int = 1) -> StepGradients:
        """Return the loss and gradients of a step without an update; `step` seeds the dropout."""
        self.runner.settle()

        def compute() -> StepGradients:
            found = self.builder.build(examples, step)
            self.runner.finish(found.graph)
            found.loss, found.gradients = float(found.loss), self.vectors.split(found.gradients)
            return found

        share = self.builder.share(examples)
        return retried(compute, partial(self.runner.adapt, self.batches, share))

    def evaluate(
        self, examples: Sequence[Example], on_progress: Callable[[int], None] = lambda done: None
    ) -> InstructBatchResult:
        """Return the loss and metrics of examples, which must include every example of each row.

        `on_progress` is called with the number of finished examples.
        """
        return self.measure(examples, self.logps(examples, on_progress))

    def measure(
        self, examples: Sequence[Example], logps: npt.NDArray[np.float64]
    ) -> InstructBatchResult:
        """Return a result with the cross-entropy per supervised token or the objective's loss.

        `logps` (E,) are the log-probabilities of the examples.
        """
        counted = training_examples(examples)
        tokens, total = count_tokens(counted), sum(map(len, counted))
        if self.objective.is_sft:
            loss, metrics = -float(logps.sum()) / tokens, dict[str, float]()
        else:
            loss, metrics = self.objective.evaluate(examples, logps)
        return InstructBatchResult(
            loss, tokens, perplexity(loss), total_tokens=total, metrics=metrics
        )

    def logps(
        self, examples: Sequence[Example], on_progress: Callable[[int], None] = lambda done: None
    ) -> npt.NDArray[np.float64]:
        """Return each example's summed log-probability over its supervised tokens, float64 (E,)."""
        self.runner.settle()
        self.model.eval()
        return -self.losses.of(examples, on_progress)

    def reference(self) -> Mapping[str, Any]:
        """Return the JSON values on which the initial model's log-probabilities depend."""
        provenance, (_, record) = self._provenance(), self._base
        named, used = ("base_hash", "dtype", "quantized_compute"), ("prompt", "objective")
        lora: dict[str, Any] = {}
        if self.config.init != "lora":
            # PiSSA's initial model equals the base except for rounding, which depends on rank and
            # targets. The number of epochs is left out, because it may change later.
            lora = dataclasses.asdict(self.config) | {"epochs": None}
        return {
            **{name: provenance.get(name) for name in named},
            # Entries that only matter when the adapter is used are left out.
            "base": {name: value for name, value in (record or {}).items() if name not in used},
            "adapter": self.initial_hash,
            "lora": lora,
        }

    def relieve_memory(self, halve_for: Sequence[Example] | None = None) -> int | None:
        """Free the memory that MLX keeps for later arrays.

        Given the examples of a step, also set the micro-batches' `max_tokens` to half the size of
        the step's largest micro-batch, and return the new value. If each micro-batch has only one
        example, or if workers share the model, halve nothing and return None.
        """
        mx.clear_cache()
        if halve_for is None or not self.batches.halve(self.builder.share(halve_for)):
            return None
        return self.batches.max_tokens

    def write(self, weights: Path) -> None:
        """Write the adapter file, and adapter_config.json next to it. Raises OutputError."""
        make_folder(weights.parent)
        checkpoint_tensors.adapter_writer(self.model, self.lora, *self._base)(weights)

    def snapshot(self) -> Callable[[Path], None]:
        """Return a function that writes the adapter and the optimizer into a folder.

        The function writes the state from the time when `snapshot` was called, with the adapter in
        mlx-lm's format. The function raises OutputError.
        """
        self.runner.settle()
        self._workers.check_same(self.model.trainable_parameters(), self.builder.steps)
        settings = {"step": self.builder.steps, "micro_batch_tokens": self.batches.max_tokens}
        adapter = checkpoint_tensors.adapter_writer(self.model, self.lora, *self._base)
        parameters = checkpoint_tensors.parameters_writer(self.model, self.lora)
        optimizer = checkpoint_tensors.optimizer_writer(self._optimizer.state_for_file(), settings)

        def write(folder: Path) -> None:
            adapter(folder / ADAPTER)
            parameters(folder)
            optimizer(folder / OPTIMIZER)

        return write

    def load(self, folder: Path) -> None:
        """Load the adapter of a snapshot; with several workers, worker 0 reads it for all.

        Raises ModelError if the adapter does not fit.
        """
        self.runner.settle()
        if self._workers.index == 0:
            checkpoint_tensors.read_parameters(folder, self.model, self.lora)
        self.model.update(self._workers.from_first(self.model.trainable_parameters()))
        self._optimizer.adopt(self.model)

    def restore(self, folder: Path) -> None:
        """Resume from a snapshot as if the run had not stopped.

        Raises ModelError if the snapshot does not fit.
        """
        path = folder / OPTIMIZER
        state, settings = checkpoint_tensors.read_optimizer(path, self._optimizer.state)
        tokens, steps = settings.get("micro_batch_tokens", 0), settings.get("step", -1)
        if tokens < 1 or steps < 0:
            raise ModelError(f"{path}: has no step or micro-batch size")
        self.runner.settle()
        checkpoint_tensors.read_parameters(folder, self.model, self.lora)
        self._optimizer.adopt(self.model)
        self._optimizer.take_from_file(state)
        # A halved limit stays halved, and a limit that is lower now, for less memory, stays lower.
        self.batches.limit(min(tokens, self.batches.max_tokens))
        self.builder.steps = steps

    def describe(self) -> Mapping[str, Any]:
        """Return a checkpoint's entries about the adapter, the workers and the provenance."""
        return {
            "lora_rank": self.config.lora_rank,
            "lora_alpha": self.config.lora_alpha,
            "targets": list(self.config.targets),
            "workers": self._workers.describe(),
            **({"init_adapter_hash": self.initial_hash} if self.initial_hash else {}),
            **self._provenance(),
        }
