"""mlx-lm as the peer of `mlxtune bench`: trains on the same examples with mlx-lm's own code."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, iterate_batches
from mlx_lm.tuner.utils import load_adapters

from mlxtune.backend.adapters import checkpoint_tensors
from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.lora.apply import apply_lora
from mlxtune.backend.models.loading import BaseModel, load_lazily
from mlxtune.backend.models.model_folder import read_config
from mlxtune.backend.models.quantize import quantize_lazily, read_one_by_one
from mlxtune.backend.models.stored_layers import cast_parameters
from mlxtune.backend.models.token_array import TokenArrays
from mlxtune.config import InstructConfig, TrainConfig
from mlxtune.core.data.encode import Example, forward_tokens
from mlxtune.core.files.writing import make_folder
from mlxtune.core.run.checkpoint import ADAPTER


class MlxLm:
    """mlx-lm's trainer: its batches, loss, LoRA and step, with mlxtune's optimizer settings.

    mlx-lm's spans of supervised tokens end one token after the row, on a token of padding. In this
    class the spans end at the last supervised token, so both contestants have equal labels. If
    a step has more examples than a batch holds, they are sorted by length and run in several
    batches, and the gradients of all batches are added before the update.
    """

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        # mlx-lm's train() also sets this limit.
        recommended = mx.device_info().get("max_recommended_working_set_size")
        if recommended is not None:
            mx.set_wired_limit(int(recommended))
        self.loss_function = "default"
        self.execution = "eager" if on_cpu() else "compiled"
        self._lora, self._max_seq_len = config.pipeline_config(), config.max_seq_len
        self._batch_size = config.batch_size
        model_config = read_config(folder, trust_remote_code=config.trust_remote_code)
        self._model, model_config = load_lazily(folder, model_config)
        if config.quantize is not None:
            quantize_lazily(self._model, model_config, config.quantize)
        cast_parameters(self._model, getattr(mx, config.dtype))
        if config.quantize is not None:
            read_one_by_one(self._model)
        mx.eval(self._model.parameters())
        self._ids = TokenArrays(self._model)

    def start(self, adapter: Path, steps: Sequence[Sequence[Example]]) -> None:
        """Attach mlx-lm's LoRA to the model, and build the step, compiled except on the CPU."""
        if not all(has_one_span(example) for step in steps for example in step):
            self.loss_function = "masked"
        model = self._model
        model.freeze()
        load_adapters(model, str(adapter))
        model.train()
        self._optimizer = optim.AdamW(
            self._lora.lr,
            betas=[0.9, 0.999],
            eps=1e-8,
            weight_decay=self._lora.weight_decay,
            bias_correction=True,
        )
        self._optimizer.init(model.trainable_parameters())
        self.state = [model.state, self._optimizer.state, mx.random.state]
        mx.eval(self.state)
        # On the CPU, compiling runs a C++ compiler and gains no speed.
        self._step = self.make_step(compiled=not on_cpu())

    def warm_up(self, steps: Sequence[Sequence[Example]]) -> float | None:
        """Take the steps and undo them; return the first step's loss with mlx-lm's own spans.

        The loss is None if `loss_function` is masked. On the CPU, the shortest example is enough,
        because nothing is compiled for a step's shape.
        """
        with self.unchanged():
            for examples in [[min(steps[0], key=len)]] if on_cpu() else steps:
                self.step(0, examples)
        return self._own_loss(steps[0]) if self.loss_function == "default" else None

    def step(self, number: int, examples: Sequence[Example]) -> float:
        loss = mx.array(0.0)
        for part, gradients in self.parts(self._step, examples):
            loss = loss + part
            mx.eval(self.state, loss, gradients)
            # By default, mlx-lm's train() also clears the cache after each step.
            if mx.get_cache_memory() > TrainingArgs().clear_cache_threshold:
                mx.clear_cache()
        return float(loss)

    def token_counts(self, examples: Sequence[Example]) -> tuple[int, int]:
        forward = 0
        for batch in self.batches(examples):
            tokens, *_ = self.batch(batch)
            forward += tokens.shape[0] * (tokens.shape[1] - 1)
        return forward, forward - sum(map(forward_tokens, examples))

    def batches(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Return the examples of a step in batches, sorted by length as in mlx-lm."""
        by_length, size = sorted(examples, key=len), self._batch_size
        return [by_length[start : start + size] for start in range(0, len(by_length), size)]

    def loss_and_gradients(self, tokens: mx.array, supervised: mx.array) -> Any:
        """Return a batch's loss and number of labels as a pair, and then the batch's gradients."""
        loss = default_loss if self.loss_function == "default" else masked_loss
        return nn.value_and_grad(self._model, loss)(self._model, tokens, supervised)

    def make_step(self, *, compiled: bool) -> Callable[..., Any]:
        """Return a function that sums batches' gradients and, in the last batch, updates LoRA."""

        def step(
            tokens: mx.array, supervised: mx.array, fraction: mx.array, before: Any, last: bool
        ) -> tuple[mx.array, Any]:
            (value, _), gradients = self.loss_and_gradients(tokens, supervised)
            gradients = tree_map(lambda gradient: gradient * fraction, gradients)
            if before is not None:
                gradients = tree_map(mx.add, before, gradients)
            if last:
                self._optimizer.update(self._model, gradients)
                gradients = None
            return value * fraction, gradients

        return mx.compile(step, inputs=self.state, outputs=self.state) if compiled else step

    def _own_loss(self, examples: Sequence[Example]) -> float:
        batches = [self.batch(batch, own=True) for batch in self.batches(examples)]
        losses = [default_loss(self._model, tokens, spans)[0] for tokens, spans, _ in batches]
        counts = [count for _, _, count in batches]
        return float(np.average([float(loss) for loss in losses], weights=counts))

    def parts(
        self, step: Callable[..., Any], examples: Sequence[Example]
    ) -> Iterator[tuple[mx.array, Any]]:
        """Take a step; yield each batch's part of the loss, and the sum of the gradients so far.

        Yields None in place of the last sum, which the update has used.
        """
        batches = [self.batch(batch) for batch in self.batches(examples)]
        total = sum(count for _, _, count in batches)
        gradients = None
        for i, (tokens, supervised, count) in enumerate(batches, 1):
            fraction, last = mx.array(count / total), i == len(batches)
            part, gradients = step(tokens, supervised, fraction, gradients, last)
            yield part, gradients

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the model and the optimizer after the block."""
        before = self._model.trainable_parameters()
        state = tree_map(lambda value: value, self._optimizer.state)
        try:
            yield
        finally:
            self._model.update(before)
            # A compiled step reads its state from the list `self.state`.
            self._optimizer.state = self.state[1] = state

    def batch(
        self, examples: Sequence[Example], *, own: bool = False
    ) -> tuple[mx.array, mx.array, int]:
        """Return padded tokens (B, L), their supervised spans or mask, and the number of labels.

        A span is the pair of the first and the last supervised position. With `own`, the span ends
        one position after the row, as in mlx-lm.
        """
        rows = [
            (self._ids.check(each.tokens).tolist(), int(each.assistant_mask.argmax()))
            for each in examples
        ]
        tokens, own_spans = next(iterate_batches(rows, len(rows), self._max_seq_len))
        if self.loss_function == "masked":
            mask = np.zeros(tokens.shape, dtype=np.bool_)
            for supervised, example in zip(mask, examples, strict=True):
                supervised[: len(example)] = example.assistant_mask
            return tokens, mx.array(mask[:, 1:]), int(mask[:, 1:].sum())
        spans = np.array(own_spans)
        if not own:
            spans[:, 1] = [np.flatnonzero(each.assistant_mask)[-1] for each in examples]
        return tokens, mx.array(spans), int((spans[:, 1] - spans[:, 0] + 1).sum())


def has_one_span(example: Example) -> bool:
    """Return whether the supervised tokens of an example are one contiguous span."""
    where = np.flatnonzero(example.assistant_mask)
    return bool(len(where)) and int(where[-1] - where[0]) == len(where) - 1


def masked_loss(
    model: nn.Module, tokens: mx.array, supervised: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the mean loss and the number of the labels that a bool mask (B, L - 1) chooses.

    For one span per row, the result equals that of mlx-lm's `default_loss`, which supports no other
    masks.
    """
    logits = model(tokens[:, :-1])
    losses = nn.losses.cross_entropy(logits, tokens[:, 1:]) * supervised
    count = supervised.sum()
    return losses.astype(mx.float32).sum() / count, count


def write_start(base: BaseModel, config: InstructConfig, adapter: Path) -> None:
    """Write the adapter that both contestants start from, initialised as in `train`, to a folder.

    Attaches LoRA to the model, but reads no weights. Raises ModelError.
    """
    summary = apply_lora(base.model, config)
    make_folder(adapter)
    checkpoint_tensors.adapter_writer(base.model, summary, str(base.folder))(adapter / ADAPTER)
