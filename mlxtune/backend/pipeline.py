"""InstructPipeline: one optimizer step at a time, and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlxtune.backend import adapters, memory
from mlxtune.backend.lora import LoRASummary, apply_lora, step_keys
from mlxtune.backend.loss import cross_entropy_sum
from mlxtune.config import InstructConfig
from mlxtune.core.batch import MicroBatch, collate, plan_micro_batches
from mlxtune.core.checkpoint import ADAPTER, make_folder
from mlxtune.core.encode import Example
from mlxtune.core.metrics import InstructBatchResult, InstructStepResult, perplexity
from mlxtune.errors import NonFiniteLossError


class InstructPipeline:
    """A model with LoRA on it, and AdamW over the LoRA matrices.

    Applies LoRA to `model`, an mlx-lm model, which stays frozen otherwise. `micro_batch_tokens`
    bounds the padded tokens that run through the model at once; it changes neither loss nor
    gradient. `base_model` is named in the adapters that are written.

    Raises ModelError when a target matches nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        config: InstructConfig,
        *,
        micro_batch_tokens: int = 2048,
        base_model: str = "",
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.micro_batch_tokens = micro_batch_tokens
        self.lora: LoRASummary = apply_lora(model, config)
        self._base_model = base_model
        self._provenance = dict(provenance or {})
        # Decoupled weight decay and bias correction as in AdamW, arXiv:1711.05101, algorithm 2.
        self._optimizer = optim.AdamW(
            config.learning_rate,
            betas=[0.9, 0.999],
            eps=1e-8,
            weight_decay=config.weight_decay,
            bias_correction=True,
        )
        self._optimizer.init(model.trainable_parameters())
        self._loss_and_grad = nn.value_and_grad(model, self._scaled_loss)
        self._steps = 0

    @property
    def learning_rate(self) -> float:
        """The peak learning rate, which a schedule scales."""
        return self.config.learning_rate

    def train_step(self, example: Example) -> InstructStepResult:
        """Take one optimizer step, at the peak learning rate, on one example."""
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
        the examples are split into micro-batches. `step` counts from 1 and keys the randomness.

        Raises NonFiniteLossError, and changes nothing, when loss or gradient is not finite.
        """
        step = self._steps + 1 if step is None else step
        rate = self.config.learning_rate if learning_rate is None else learning_rate
        loss, grads, tokens = self.loss_and_gradients(examples, step)
        grads, norm = _clip(grads, self.config.gradient_clip_norm)
        mx.eval(grads, norm)
        grad_norm = float(norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {grad_norm}"
            raise NonFiniteLossError(
                f"step {step}: the {what} at learning rate {rate:g}; the step was not applied: "
                "lower --lr, or use --dtype float32"
            )
        self._update(grads, step, rate)
        memory.relieve_pressure()
        self._steps = step
        return InstructBatchResult(
            loss, tokens, perplexity(loss), grad_norm, total_tokens=sum(map(len, examples))
        )

    def loss_and_gradients(
        self, examples: Sequence[Example], step: int = 1
    ) -> tuple[float, dict[str, Any], int]:
        """Return loss, gradients by parameter (float32) and supervised tokens of a step.

        `step` keys the dropout; nothing is updated.
        """
        self.model.train()
        tokens = sum(int(example.assistant_mask[1:].sum()) for example in examples)
        loss, grads = 0.0, None
        for batch in self._micro_batches(examples):
            if self.config.dropout:
                self.lora.dropout_keys.rows = step_keys(self.config.seed, step, batch.rows)
            part, part_grads = self._loss_and_grad(*_arrays(batch), tokens)
            grads = part_grads if grads is None else tree_map(mx.add, grads, part_grads)
            mx.eval(part, grads)
            loss += float(part)
            memory.relieve_pressure()
        assert grads is not None
        return loss, grads, tokens

    def evaluate(self, examples: Sequence[Example]) -> InstructBatchResult:
        """Return the loss over all supervised tokens of the examples."""
        self.model.eval()
        self.lora.dropout_keys.rows = None
        total, tokens = 0.0, 0
        for batch in self._micro_batches(examples):
            total += float(cross_entropy_sum(self.model, *_arrays(batch)))
            tokens += int(batch.mask.sum())
            memory.relieve_pressure()
        loss = total / tokens
        return InstructBatchResult(
            loss, tokens, perplexity(loss), total_tokens=sum(map(len, examples))
        )

    def save(self, folder: Path) -> None:
        """Write adapters.safetensors and adapter_config.json, as mlx-lm loads them."""
        self.write(folder / ADAPTER)

    def write(self, weights: Path) -> None:
        """Write the adapter file, and adapter_config.json beside it. Raises OutputError."""
        make_folder(weights.parent)
        adapters.write_adapter(weights, self.model, self.lora, self._base_model)

    def load(self, folder: Path) -> None:
        """Read back an adapter that `save` wrote. Raises ModelError when it does not fit."""
        adapters.read_adapter(folder / ADAPTER, self.model)

    def describe(self) -> Mapping[str, Any]:
        """Return what a checkpoint says of the adapter and the versions that made it."""
        return {
            "lora_rank": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "targets": list(self.lora.targets),
            **self._provenance,
        }

    def _update(self, grads: dict[str, Any], step: int, rate: float) -> None:
        parameters = self.model.trainable_parameters()
        state = tree_map(lambda value: value, self._optimizer.state)
        self._optimizer.learning_rate = rate
        self._optimizer.update(self.model, grads)
        updated = self.model.trainable_parameters()
        finite = mx.all(mx.stack([mx.isfinite(value).all() for _, value in tree_flatten(updated)]))
        mx.eval(updated, self._optimizer.state, finite)
        if not finite:
            self.model.update(parameters)
            self._optimizer.state = state
            raise NonFiniteLossError(
                f"step {step}: the adapter is not finite after a step at learning rate {rate:g}; "
                "the step was not applied: lower --lr"
            )

    def _scaled_loss(
        self, inputs: mx.array, targets: mx.array, mask: mx.array, tokens: int
    ) -> mx.array:
        # Divided by the count of the whole step before the backward pass, which keeps float16
        # gradients in range; the micro-batches then only add up.
        return cross_entropy_sum(self.model, inputs, targets, mask) / tokens

    def _micro_batches(self, examples: Sequence[Example]) -> Iterator[MicroBatch]:
        lengths = [len(example) for example in examples]
        for group in plan_micro_batches(lengths, self.micro_batch_tokens):
            yield collate([examples[i] for i in group])


def _arrays(batch: MicroBatch) -> tuple[mx.array, mx.array, mx.array]:
    return mx.array(batch.inputs), mx.array(batch.targets), mx.array(batch.mask)


def _clip(grads: dict[str, Any], max_norm: float) -> tuple[dict[str, Any], mx.array]:
    """Return gradients scaled to the norm, where they are above it, and their norm before."""
    clipped, norm = optim.clip_grad_norm(grads, max_norm if max_norm else math.inf)
    return (clipped if max_norm else grads), norm
