"""The loss of a micro-batch, by the fastest computation that is exact for the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxtune.backend.forward.head import SplitModel
from mlxtune.backend.forward.layer_calls import Layerwise
from mlxtune.backend.forward.loss import (
    Losses,
    cross_entropies,
    head_losses,
    split_cross_entropies,
    trained_head_losses,
)
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.forward.shared_inputs import share_inputs
from mlxtune.backend.forward.side_by_side import Mixers
from mlxtune.backend.lora.layers import DropoutKeys
from mlxtune.backend.lora.model_facts import ModelFacts
from mlxtune.backend.lora.parameters import TrainedParameters
from mlxtune.backend.models.chosen_rows import ChosenRows
from mlxtune.backend.models.packed import Layout, laid_out
from mlxtune.core.steps.batch import MicroBatch
from mlxtune.core.steps.execution import Execution, Operations
from mlxtune.core.steps.pack import Pack
from mlxtune.errors import ModelError

# The factor that multiplies the loss if a model computes in float16, because gradients of single
# tokens are near that format's smallest numbers, 6e-8 to 6e-5. A power of two changes only
# exponents, and with this one, gradient entries overflow only above 256. The step divides the
# gradients by the factor in float32.
_RAISED_FLOAT16 = 256.0

# Computes the losses (P,) of hidden states (P, H) at the supervised positions.
Head = Callable[[mx.array], mx.array]


class Forward:
    """Computes the losses of one model, to which LoRA is already applied.

    `execution` is the given execution, without options that the model does not support. Without
    `trains`, no gradients are computed, and the model needs no LoRA. An adapter that will be
    switched off and on must be on the model at construction.
    """

    def __init__(
        self, model: nn.Module, dropout: DropoutKeys, execution: Execution, *, trains: bool = True
    ) -> None:
        self.model = model
        self._dropout = dropout
        self._undo_operations = execution.operations.prepare(model)
        joins = trains and execution.operations.joins
        self._undo_sharing = share_inputs(model) if joins else lambda: None
        self._split = split = SplitModel(model)
        serves = execution.operations.serves(split.dtype)
        operations: Operations = execution.operations if serves else MLX
        splits = execution.split_head and split.splits
        self.mixers = Mixers(
            model,
            by_segments=operations.by_segments,
            kernels=operations.attention_kernels(split.dtype),
        )
        self._should_pack = execution.packs
        self.execution = replace(
            execution,
            operations=operations,
            split_head=splits,
            packs=self._should_pack and splits and split.packs(self.mixers),
        )
        self.layerwise: Layerwise | None = None
        if trains:
            self.recompute(execution.recompute)
        self._linear_head = None if split.weight is None else operations.linear_head(split.dtype)
        self._vocabulary: dict[str, Any] = {}
        # In 16 bits, MLX's function, which is fused on Metal and CUDA, allocates no float32 logits.
        dtype = split.logits_dtype
        in_16_bits = dtype is not None and dtype != mx.float32
        self._entropies: Losses = (
            mx.fast.cross_entropy if in_16_bits else operations.cross_entropies
        )
        if split.vocabulary is not None:
            if not splits:
                raise ModelError("--parallel tensor does not work with this architecture's head")
            self._entropies = partial(split_cross_entropies, split.vocabulary)
            self._vocabulary = {"vocabulary": split.vocabulary}
        self._around_head: Callable[[Head, mx.array], mx.array] | None = None
        # The trained parameters, which a step replaces with the arrays of its graph.
        self.trained = TrainedParameters(model)
        self.gradients = mx.value_and_grad(self.scaled_loss)
        self.preference_gradients = mx.value_and_grad(self.preference_loss)

    def recompute(self, value: bool) -> None:
        """Recompute layers' activations in backward passes if `value`; otherwise, keep them."""
        if self.layerwise is not None:
            self.layerwise.restore()
        self.execution = replace(self.execution, recompute=value)
        passes = self.execution.operations.layer_passes(value)
        self.layerwise = None if passes is None else Layerwise(self.model, self._dropout, passes)

    def restore_model(self) -> None:
        """Undo all changes to the model."""
        self.mixers.restore()
        self._undo_sharing()
        self._undo_operations()

    @property
    def dtype(self) -> mx.Dtype | None:
        """The dtype of the hidden states, None if unknown."""
        return self._split.dtype

    @property
    def loss_scale(self) -> float:
        """The power of two to include in the `scale` of `scaled_loss`: 1 except in float16."""
        is_float16 = self.dtype is not None and self.dtype == mx.float16
        return _RAISED_FLOAT16 if is_float16 else 1.0

    @property
    def packing_problem(self) -> str:
        """The reason why examples cannot be packed; empty if they can, or if packing is off."""
        if self.execution.packs or not self._should_pack:
            return ""
        return self._split.packing_problem or "the model's head does not run apart from its layers"

    @property
    def plain_head(self) -> bool:
        """Whether the head is a single product."""
        return self._split.weight is not None

    @cached_property
    def facts(self) -> ModelFacts:
        """The matrices of each layer, and the sizes in the model's config."""
        return ModelFacts(self.model)

    def arrays(self, batch: MicroBatch | Pack, keys: mx.array | None) -> dict[str, Any]:
        """Return a micro-batch as the `arrays` of `scaled_loss`.

        `keys` are the dropout keys of the micro-batch's examples, uint32 (B,), or None for no
        dropout.
        """
        arrays: dict[str, Any] = {"inputs": mx.array(batch.inputs)}
        if isinstance(batch, Pack):
            return arrays | {
                "layout": Layout(batch.segments, self.execution.rounding),
                "keys": None if keys is None else keys[mx.array(batch.owners)][None],
                "rows": ChosenRows(batch.places, batch.inputs.size),
                "targets": mx.array(batch.targets),
            }
        if keys is not None:
            arrays["keys"] = keys
        if not self.execution.split_head:
            supervised = mx.array(np.flatnonzero(batch.mask))
            return arrays | {"targets": mx.array(batch.targets), "positions": supervised}
        positions = np.flatnonzero(batch.mask)
        targets = batch.targets.reshape(-1)[positions]
        return arrays | {
            "rows": ChosenRows(positions, batch.inputs.size),
            "targets": mx.array(targets),
        }

    def scaled_loss(
        self, parameters: Mapping[str, mx.array], arrays: Mapping[str, Any], scale: mx.array
    ) -> mx.array:
        """Return `scale` times the summed cross-entropy of a micro-batch, in nats, float32.

        A function `reduce` in `arrays` replaces the sum. `parameters` are LoRA matrices by name;
        they stay in the model. `scale` is `loss_scale`, which keeps float16 gradients in range,
        divided by the number of supervised tokens of the whole step.
        """
        self.trained.assign(parameters)
        with self.running(), laid_out(arrays.get("layout")):
            caches = self._caches(arrays)
            if self.execution.split_head:
                rows, head = self._rows(arrays, caches), self._head(arrays)
                losses = head(rows) if self._around_head is None else self._around_head(head, rows)
            else:
                losses = cross_entropies(self.model, arrays["inputs"], arrays["targets"])
                losses = losses.reshape(-1)[arrays["positions"]]
        self.mixers.stop_noting()
        reduce = arrays.get("reduce")
        return (losses.sum() if reduce is None else reduce(losses)) * scale

    def preference_loss(
        self, parameters: Mapping[str, mx.array], arrays: Mapping[str, Any], scale: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return a micro-batch's preference loss times `scale`, and the examples'
        log-probabilities.

        The log-probabilities, float32 (B,), have no gradient. `reduce` in `arrays` maps the losses
        (P,) of supervised tokens to one array with both results.
        """
        values = self.scaled_loss(parameters, arrays, mx.array(1.0))
        return values[0] * scale, mx.stop_gradient(values[1:])

    def losses(self, batch: MicroBatch | Pack, keys: mx.array | None = None) -> mx.array:
        """Return the cross-entropy of each supervised token, in nats, float32 (P,), not evaluated.

        The losses are in the batch's order and have no gradient. Dropout applies only if `keys` are
        given.
        """
        arrays = self.arrays(batch, keys)
        targets = arrays["targets"]
        # The caller reports losses that are not finite.
        with laid_out(arrays.get("layout")), np.errstate(all="ignore"):
            caches = self._caches(arrays)
            if isinstance(batch, MicroBatch) and not self.execution.split_head:
                losses = cross_entropies(self.model, arrays["inputs"], targets)
                return losses.reshape(-1)[arrays["positions"]]
            rows = self._rows(arrays, caches)
            if self._linear_head is not None:
                weight = self._split.weight
                losses = self._linear_head.head_losses(weight, rows, targets, **self._vocabulary)
            else:
                chunk = self.execution.loss_chunk
                losses = head_losses(self._split.logits, rows, targets, chunk, self._entropies)
        return losses

    def running(self) -> AbstractContextManager[None]:
        """Make layers that run inside the block prepare for their backward passes."""
        return nullcontext() if self.layerwise is None else self.layerwise.running()

    @contextmanager
    def watched(self, around: Callable[[Head, mx.array], mx.array]) -> Iterator[None]:
        """Inside the block, call `around(head, rows)` in place of a split model's `head(rows)`."""
        self._around_head = around
        try:
            yield
        finally:
            self._around_head = None

    def _rows(self, arrays: Mapping[str, Any], caches: list[Any] | None) -> mx.array:
        hidden = self._split.hidden(arrays["inputs"], caches)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        rows: mx.array = arrays["rows"].of(hidden)
        return rows

    def _head(self, arrays: Mapping[str, Any]) -> Head:
        targets = arrays["targets"]
        if self._linear_head is not None:
            weight = self._split.weight
            losses = partial(self._linear_head.trained_head_losses, **self._vocabulary)
            return partial(losses, weight, targets=targets)
        return partial(
            trained_head_losses,
            self._split.logits,
            targets=targets,
            chunk=self.execution.loss_chunk,
            losses=self._entropies,
        )

    def _caches(self, arrays: Mapping[str, Any]) -> list[Any] | None:
        """Set the dropout keys; return the layers' caches for a packed line, else None."""
        keys, layout = arrays.get("keys"), arrays.get("layout")
        if layout is None:
            self._dropout.set(keys, None)
            return None
        self._dropout.set(keys, mx.array(layout.positions.astype(np.uint32)))
        return self._split.line_caches()
