"""InstructPipeline: one optimizer step at a time, and evaluation."""

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.adapters import checkpoint_tensors, initialize
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.adapter_folder import load_tensors, tensor_bytes
from mlxtune.backend.forward.forward import Forward, StepInputs
from mlxtune.backend.forward.operations import best_execution, logits_dtype
from mlxtune.backend.lora.apply import LoRASummary, apply_lora
from mlxtune.backend.lora.lora_layers import DropoutKeys
from mlxtune.backend.step.engine import Engine
from mlxtune.backend.step.optimizer_step import OptimizerStep, StepGradients
from mlxtune.backend.step.phases import Phases
from mlxtune.backend.step.step_loss import count_tokens
from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.text.sampling import sample
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example, StepExamples, predicted_tokens
from mlxtune.core.evaluation.outcome import perplexity
from mlxtune.core.files.reading import file_hash
from mlxtune.core.files.writing import make_folder
from mlxtune.core.objectives.objective import SFT
from mlxtune.core.objectives.policy import (
    SampledAnswer,
    SampleRequest,
    StepObjective,
)
from mlxtune.core.run.checkpoint import ADAPTER, INITIAL_HASH, OPTIMIZER
from mlxtune.core.run.metrics import InstructBatchResult, InstructStepResult
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_terms import BatchLoad
from mlxtune.core.steps.micro_batch import PaddedBatch
from mlxtune.core.steps.pack import Pack
from mlxtune.core.training.pipeline import StepOutcome
from mlxtune.core.training.requests import NO_REQUESTS, Requests
from mlxtune.errors import ModelError

# The facts of the provenance, and the entries of the base's record, that decide the reference's
# log-probabilities. Further entries of written adapters describe the rows, whose tokens are in the
# reference's key.
_REFERENCE_FACTS = ("base_hash", "dtype", "quantized_compute")
_REFERENCE_BASE_KEYS = ("base", "quantize", "double_quant")


class InstructPipeline:
    """A model with LoRA on it, and AdamW over the LoRA matrices.

        model         an mlx-lm model, which gets LoRA; its own weights stay frozen
        execution     how steps are computed, with the same loss and gradient; default: the fastest
        base_model    the model's name in written adapters
        base_record   further entries of written adapters
        fresh         LoRA gets its first values here; otherwise, from `restore`, before any use
        initial       the adapter to start from, if it is already open
        initial_hash  if not `fresh`, the SHA-256 of the adapter that the run started from
        provenance    returns further entries for a checkpoint's metadata
        warn          called when memory runs out and micro-batches are halved, and after faults
        workers       take the same steps together; each computes its part of the examples
        objective     the loss to minimise

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
        workers: Workers = SINGLE_PROCESS,
        objective: StepObjective = SFT,
    ) -> None:
        self.objective = objective
        self.model = model
        self.config = config
        # The rate of `train_step` and `train_batch` unless given, and of a trainer without a rate.
        self.learning_rate = config.lr
        dropout_keys = DropoutKeys()
        self.lora: LoRASummary = apply_lora(model, config, dropout_keys)
        execution = execution or best_execution(
            self.lora.total_parameters, logits_dtype(model), model=model
        )
        self.forward = Forward(model, dropout_keys, execution, temperature=objective.temperature)
        self._workers = workers
        self._base = base_model, base_record
        self._provenance = provenance
        self.initial_hash = (
            initialize.initialize(model, self.lora, initial) if fresh else initial_hash
        )
        self._reference = self.forward.trained.values() if objective.needs_reference_lora else {}
        self._engine = Engine(
            self.forward, self.lora, objective=objective, workers=workers, warn=warn
        )
        # Whether LoRA has values, which `restore` gives it if it is not fresh.
        self._has_values = fresh
        if fresh:
            self._engine.optimizer.adopt(model)

    @property
    def world_size(self) -> int:
        """The number of workers that take each step together."""
        return self._workers.world_size

    @property
    def phases(self) -> Phases:
        """The phases of a step, for a profiler."""
        return self._engine.phases

    def run_as(
        self,
        execution: Execution,
        peak: int | None = None,
        fits: Callable[[BatchLoad], bool] | None = None,
    ) -> None:
        """Use an execution's micro-batch size, loss chunks and recomputation from now on.

        Evaluations then take at most the `peak` of training in bytes, if it is known. Micro-batches
        that `fits` rejects are halved.
        """
        self._engine.run_as(execution, peak, fits)

    def step_inputs(self, batch: PaddedBatch | Pack, step: int) -> StepInputs:
        """Return the model's inputs for a micro-batch of a step, which seeds the dropout."""
        return self._engine.inputs(batch, step)

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
        rate = self.learning_rate if learning_rate is None else learning_rate
        started = self.start_batch(examples, step=step, learning_rate=rate)
        return self.wait(started).result()

    def start_batch(
        self,
        examples: Sequence[Example],
        *,
        step: int | None = None,
        learning_rate: float,
        requests: Requests = NO_REQUESTS,
    ) -> OptimizerStep:
        """Start the step that `train_batch` takes, and return it while it runs, for `wait`.

        If possible, builds the step's graph while the device still computes the previous step,
        whose update is applied before this step runs. Several workers exchange their `requests`
        with the step.
        """
        return self._ready().start_batch(examples, step, learning_rate, requests)

    def wait(self, step: OptimizerStep) -> StepOutcome:
        """Wait for a started step, if it has not ended yet, and return its outcome."""
        return self._engine.wait(step)

    def _ready(self) -> Engine:
        """Return the engine, for work that needs LoRA's values."""
        assert self._has_values, "a pipeline that is not fresh must be restored before its use"
        return self._engine

    def _idle(self) -> Engine:
        """Return the engine once no step runs, to read or change the model or the optimizer."""
        engine = self._ready()
        engine.commit_launched()
        return engine

    def loss_and_gradients(self, examples: Sequence[Example], step: int = 1) -> StepGradients:
        """Return the loss and gradients of a step without an update; `step` seeds the dropout."""
        engine = self._idle()
        return engine.gradients(engine.new_step(examples, step))

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
        counted = StepExamples.of(examples).training
        tokens, total = count_tokens(map(predicted_tokens, counted)), sum(map(len, counted))
        loss, metrics = self.objective.evaluate(examples, logps)
        return InstructBatchResult(
            loss, tokens, perplexity(loss), total_tokens=total, metrics=metrics
        )

    def logps(
        self, examples: Sequence[Example], on_progress: Callable[[int], None] = lambda done: None
    ) -> npt.NDArray[np.float64]:
        """Return each example's summed log-probability over its supervised tokens, float64 (E,)."""
        engine = self._idle()
        self.model.eval()
        return -engine.losses.compute(examples, on_progress)

    def token_logps(
        self, examples: Sequence[Example], *, before_training: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        """Return the log-probability of each example's supervised tokens, float32 (A,).

        With `before_training`, the model is as it was before its first step, which the
        pipeline keeps if its objective weights the divergence from it.
        """
        engine = self._idle()
        self.model.eval()
        with self.forward.trained.replaced(self._reference if before_training else {}):
            losses = engine.losses.of_tokens(examples)
        return [-each.astype(np.float32) for each in losses]

    def reference_lora_file(self) -> bytes | None:
        """Return a file of LoRA's values before the first step, if the objective needs them."""
        return tensor_bytes(self._reference, {"format": "mlx"}) if self._reference else None

    def load_reference_lora(self, path: Path, digest: object) -> None:
        """Load the file of `reference_lora_file`; with several workers, worker 0 reads it for all.

        Raises ModelError if it is missing, or if its SHA-256 is not `digest`.
        """
        if self._workers.rank == 0:
            try:
                problem = "has changed" if file_hash(path) != digest else ""
            except OSError:
                problem = "is missing"
            if problem:
                raise ModelError(
                    f"{path}, the model from which --kl measures, {problem}: bring it back, or "
                    "start over with --overwrite"
                )
            self._reference = load_tensors(path, self._reference)[0]
        # Their names are paths, which a tree of arrays would split.
        names = sorted(self._reference)
        values = self._workers.broadcast([self._reference[name] for name in names])
        self._reference = dict(zip(names, values, strict=True))

    def sample(
        self,
        requests: Sequence[SampleRequest],
        sampling: Sampling,
        stop_tokens: frozenset[int],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[SampledAnswer]:
        """Return an answer of the current model for each request; see `sampling.sample`."""
        self._idle()
        self.forward.turn_dropout_off()  # the last step may have had dropout
        return sample(self.model, requests, sampling, stop_tokens, on_progress)

    def adapter_hash(self) -> str:
        """Return the SHA-256 of the LoRA matrices."""
        self._idle()
        digest = hashlib.sha256()
        for name, value in sorted(self.forward.trained.values().items()):
            digest.update(name.encode())
            digest.update(np.array(value.astype(mx.float32)).tobytes())
        return digest.hexdigest()

    def reference(self) -> Mapping[str, Any]:
        """Return the JSON values on which the reference's log-probabilities depend."""
        provenance = self._provenance()
        record = self._base[1] or {}
        lora: dict[str, Any] = {}
        if self.config.is_pissa:
            # PiSSA's reference equals the base except for rounding, which depends on rank and
            # targets. The number of epochs is left out, because it may change later.
            lora = dataclasses.asdict(self.config) | {"epochs": None}
        return {
            **{name: provenance.get(name) for name in _REFERENCE_FACTS},
            "base": {name: record[name] for name in _REFERENCE_BASE_KEYS if name in record},
            "adapter": self.initial_hash,
            "lora": lora,
        }

    def relieve_memory(self, halve_for: Sequence[Example] | None = None) -> int | None:
        """Free the memory that MLX keeps for later arrays.

        Given the examples of a step, also limit micro-batches to half the size of the step's
        largest, and return the new limit in tokens. If each micro-batch has only one
        example, or if workers share the model, halve nothing and return None.
        """
        mx.clear_cache()
        return None if halve_for is None else self._engine.halve(halve_for)

    def write(self, weights: Path) -> None:
        """Write the adapter file, and adapter_config.json next to it. Raises OutputError."""
        self._idle()
        make_folder(weights.parent)
        checkpoint_tensors.adapter_writer(self.model, self.lora, *self._base)(weights)

    def snapshot(self) -> Callable[[Path], None]:
        """Return a function that writes the adapter and the optimizer into a folder.

        The function writes the state from the time when `snapshot` was called, with the adapter in
        mlx-lm's format. The function raises OutputError.
        """
        engine = self._idle()
        self._workers.check_same(self.model.trainable_parameters(), engine.committed_steps)
        settings = {
            "step": engine.committed_steps,
            "micro_batch_tokens": engine.micro_batches.max_tokens,
        }
        adapter = checkpoint_tensors.adapter_writer(self.model, self.lora, *self._base)
        parameters = checkpoint_tensors.parameters_writer(self.model, self.lora)
        optimizer = checkpoint_tensors.optimizer_writer(engine.optimizer.state_for_file(), settings)

        def write(folder: Path) -> None:
            adapter(folder / ADAPTER)
            parameters(folder)
            optimizer(folder / OPTIMIZER)

        return write

    def load(self, folder: Path) -> None:
        """Load the adapter of a snapshot; with several workers, worker 0 reads it for all.

        Raises ModelError if the adapter does not fit.
        """
        self._engine.commit_launched()
        if self._workers.rank == 0:
            checkpoint_tensors.read_parameters(folder, self.model, self.lora)
        self.model.update(self._workers.broadcast(self.model.trainable_parameters()))
        self._engine.optimizer.adopt(self.model)
        self._has_values = True

    def restore(self, folder: Path) -> None:
        """Resume from a snapshot as if the run had not stopped.

        Raises ModelError if the snapshot does not fit.
        """
        engine, path = self._engine, folder / OPTIMIZER
        state, settings = checkpoint_tensors.read_optimizer(path, engine.optimizer.state)
        tokens, steps = settings.get("micro_batch_tokens", 0), settings.get("step", -1)
        if tokens < 1 or steps < 0:
            raise ModelError(f"{path} has no step or micro-batch size")
        engine.commit_launched()
        checkpoint_tensors.read_parameters(folder, self.model, self.lora)
        engine.restore(state, steps, tokens)
        self._has_values = True

    def describe(self) -> Mapping[str, Any]:
        """Return a checkpoint's entries about the adapter, the workers and the provenance."""
        return {
            "lora_rank": self.config.rank,
            "lora_alpha": self.config.alpha,
            "targets": list(self.config.targets),
            "workers": self._workers.describe(),
            **({INITIAL_HASH: self.initial_hash} if self.initial_hash else {}),
            **self._provenance(),
        }
