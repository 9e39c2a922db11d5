"""The loss of a micro-batch, by the fastest computation that is exact for the model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxtune.backend.forward.head import BackboneAndHead
from mlxtune.backend.forward.layer_calls import Layerwise
from mlxtune.backend.forward.loss import (
    LossFn,
    at_temperature,
    cross_entropies,
    head_losses,
    sharded_cross_entropies,
    trained_head,
)
from mlxtune.backend.forward.operations import MLX, operations_of
from mlxtune.backend.forward.packed_mixers import Mixers
from mlxtune.backend.forward.shared_inputs import share_inputs
from mlxtune.backend.lora.lora_layers import DropoutKeys
from mlxtune.backend.lora.model_facts import ModelFacts
from mlxtune.backend.lora.parameters import TrainedParameters
from mlxtune.backend.models.gather import Gather
from mlxtune.backend.models.packed import Layout, laid_out
from mlxtune.backend.models.token_array import TokenArrays
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.micro_batch import PaddedBatch
from mlxtune.core.steps.pack import Pack
from mlxtune.errors import ModelError

# The factor that multiplies the loss if a model computes in float16, because gradients of single
# tokens can underflow in float16, whose smallest numbers are 6e-8 to 6e-5. A power of two changes
# only exponents, and with this one, gradient entries overflow only above 256. The step divides the
# gradients by the factor in float32.
_FLOAT16_LOSS_SCALE = 256.0

# Maps hidden states (P, H) at the supervised positions to their losses (P,), which come first.
HeadFn = Callable[[mx.array], Sequence[mx.array]]
# Maps the losses (P,) of a micro-batch to its part of the step's loss, and to values without a
# gradient that the step adds up.
ReduceFn = Callable[[mx.array], tuple[mx.array, ...]]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """A micro-batch as a model's inputs: B examples padded to T tokens, or one packed sequence.

    P is the number of supervised positions, those that predict a supervised token.

        tokens     int32 (B, T)
        labels     int32 (P,)    the supervised tokens; with `positions`, all tokens (B, T)
        selected   selects the hidden states (P, H) of the supervised positions from (B * T, H)
        positions  int64 (P,)    indices into the losses (B * T,), if the head cannot run apart
        keys       uint32 (B,)   dropout keys; (1, T) for a packed sequence, None for no dropout
        layout     the segments of a packed sequence; None if examples are padded
    """

    tokens: mx.array
    labels: mx.array
    selected: Gather | None = None
    positions: mx.array | None = None
    keys: mx.array | None = None
    layout: Layout | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that are on the device before the model runs."""
        arrays = (self.tokens, self.labels, self.positions, self.keys)
        return [array for array in arrays if array is not None]


def summed(losses: mx.array) -> tuple[mx.array, ...]:
    """Return the sum of losses, as a `ReduceFn`."""
    return (losses.sum(),)


class Forward:
    """Computes the losses and gradients of one model, to which LoRA is already applied.

    The attribute `execution` is the requested execution minus the features that this model does
    not support; `MicroBatches` applies its limit of tokens. `operations` are its operations. Logits
    are divided by `temperature`. Without `trains`, there are no gradients, and the model needs no
    LoRA. To switch an adapter off and on later, attach it before construction.
    """

    def __init__(
        self,
        model: nn.Module,
        dropout: DropoutKeys,
        execution: Execution,
        *,
        trains: bool = True,
        temperature: float = 1.0,
    ) -> None:
        self.model, self._temperature = model, temperature
        self._ids = TokenArrays(model)
        self._dropout = dropout
        operations = operations_of(execution)
        self._undo_operations = operations.prepare(model)
        joins = trains and operations.joins
        self._undo_sharing = share_inputs(model) if joins else lambda: None
        self._backbone_and_head = parts = BackboneAndHead(model)
        self.operations = operations if operations.supports(parts.dtype) else MLX
        self.mixers = Mixers(
            model,
            by_segments=self.operations.by_segments,
            kernels=self.operations.attention_kernels(parts.dtype),
        )
        self._should_pack = execution.packs
        separate_head = execution.separate_head and parts.is_separable
        self._can_pack = execution.packs and separate_head and parts.try_packing(self.mixers)
        self.execution, self._trains = self.supported(execution), trains
        self.layerwise = self._layerwise()
        weight = parts.weight
        self._linear_head = None if weight is None else self.operations.linear_head(parts.dtype)
        self._vocabulary: dict[str, Any] = {}
        # In 16 bits, MLX's function, which is fused on Metal and CUDA, allocates no float32 logits.
        dtype = parts.logits_dtype
        in_16_bits = dtype is not None and dtype != mx.float32
        self._entropies: LossFn = (
            mx.fast.cross_entropy if in_16_bits else self.operations.cross_entropies
        )
        if parts.vocabulary is not None:
            if not separate_head:
                raise ModelError("--parallel tensor does not work with this architecture's head")
            self._entropies = partial(sharded_cross_entropies, parts.vocabulary)
            self._vocabulary = {"vocabulary": parts.vocabulary}
        self._around_head: Callable[[HeadFn, mx.array], Sequence[mx.array]] | None = None
        # The trained parameters, which a step replaces with the arrays of its graph.
        self.trained = TrainedParameters(model)
        self.gradients = mx.value_and_grad(self.scaled_loss)

    def supported(self, execution: Execution) -> Execution:
        """Return an execution with this model's operations, and only the features it supports."""
        return replace(
            execution,
            operations=self.operations,
            separate_head=execution.separate_head and self._backbone_and_head.is_separable,
            packs=execution.packs and self._can_pack,
        )

    def run_as(self, execution: Execution) -> None:
        """Use an execution's loss chunks and recomputation from now on."""
        if self.layerwise is not None:
            self.layerwise.restore()
        self.execution = self.supported(execution)
        self.layerwise = self._layerwise()

    @contextmanager
    def running_as(self, execution: Execution) -> Iterator[None]:
        """Use `execution` inside the block, then restore the current one."""
        present = self.execution
        try:
            self.run_as(execution)
            yield
        finally:
            self.run_as(present)

    def _layerwise(self) -> Layerwise | None:
        passes = self.operations.layer_passes(self.execution.recompute) if self._trains else None
        return None if passes is None else Layerwise(self.model, self._dropout, passes)

    def restore_model(self) -> None:
        """Undo all changes to the model."""
        self.mixers.restore()
        self._undo_sharing()
        self._undo_operations()

    @property
    def dtype(self) -> mx.Dtype | None:
        """The dtype of the hidden states, None if unknown."""
        return self._backbone_and_head.dtype

    @property
    def loss_scale(self) -> float:
        """The power of two to include in the `scale` of `scaled_loss`: 1 except in float16."""
        is_float16 = self.dtype is not None and self.dtype == mx.float16
        return _FLOAT16_LOSS_SCALE if is_float16 else 1.0

    @property
    def packing_problem(self) -> str:
        """The reason why examples cannot be packed; empty if they can, or if packing is off."""
        if self.execution.packs or not self._should_pack:
            return ""
        return (
            self._backbone_and_head.packing_problem
            or "the model's head does not run apart from its layers"
        )

    @property
    def plain_head(self) -> bool:
        """Whether the head is a single matmul."""
        return self._backbone_and_head.weight is not None

    @cached_property
    def facts(self) -> ModelFacts:
        """The matrices of each layer, and the sizes in the model's config."""
        return ModelFacts(self.model)

    def inputs(self, batch: PaddedBatch | Pack, keys: mx.array | None) -> StepInputs:
        """Return the inputs of a micro-batch.

        `keys` are the dropout keys of the micro-batch's examples, uint32 (B,), or None for no
        dropout. Raises ModelError if the model's embedding has no row for a token.
        """
        tokens, labels = self._ids.array(batch.inputs), self._ids.check(batch.labels)
        if isinstance(batch, Pack):
            return StepInputs(
                tokens,
                mx.array(labels),
                Gather(batch.label_positions, batch.inputs.size),
                keys=None if keys is None else keys[mx.array(batch.owners)][None],
                layout=Layout(batch.segments, self.execution.rounding),
            )
        positions = np.flatnonzero(batch.mask)
        if not self.execution.separate_head:
            return StepInputs(tokens, mx.array(labels), positions=mx.array(positions), keys=keys)
        selected_labels = mx.array(labels.reshape(-1)[positions])
        return StepInputs(tokens, selected_labels, Gather(positions, batch.inputs.size), keys=keys)

    def scaled_loss(
        self,
        parameters: Mapping[str, mx.array],
        inputs: StepInputs,
        scale: mx.array,
        reduce: ReduceFn = summed,
        outputs: list[mx.array] | None = None,
    ) -> tuple[mx.array, ...]:
        """Return `scale` times a micro-batch's loss, in nats, float32, then the values of `reduce`.

        `reduce` maps the cross-entropy (P,) of the supervised tokens to the loss. `parameters` are
        LoRA matrices by name. `scale` includes `loss_scale`, which keeps float16 gradients in
        range. The layers' mixers append their outputs to `outputs`, if it is given, but not when
        the backward pass runs them again.
        """
        with (
            self.running(),
            self.trained.replaced(parameters),
            laid_out(inputs.layout),
            self.mixers.recording(outputs),
        ):
            self._set_dropout(inputs)
            if inputs.selected is None:
                losses = self._whole_losses(inputs)
            else:
                hidden = inputs.selected.gather(self._hidden(inputs))
                head, around = self._head(inputs.labels), self._around_head
                losses = (head(hidden) if around is None else around(head, hidden))[0]
        loss, *values = reduce(losses)
        return loss * scale, *map(mx.stop_gradient, values)

    def losses(
        self,
        batch: PaddedBatch | Pack,
        keys: mx.array | None = None,
        outputs: list[mx.array] | None = None,
    ) -> mx.array:
        """Return the cross-entropy of each supervised token, in nats, float32 (P,), not evaluated.

        The losses are in the batch's order and have no gradient. Dropout applies only if `keys` are
        given. The layers' mixers append their outputs to `outputs`, if it is given.
        """
        inputs = self.inputs(batch, keys)
        with (
            laid_out(inputs.layout),
            self.mixers.recording(outputs),
            # The caller reports losses that are not finite.
            np.errstate(all="ignore"),
        ):
            self._set_dropout(inputs)
            if inputs.selected is None:
                return self._whole_losses(inputs)
            hidden, labels = inputs.selected.gather(self._hidden(inputs)), inputs.labels
            if (
                self._linear_head is not None
                and (weight := self._backbone_and_head.weight) is not None
            ):
                hidden = at_temperature(hidden, self._temperature)
                losses = self._linear_head.head_losses(weight, hidden, labels, **self._vocabulary)
            else:
                chunk = self.execution.loss_chunk
                losses = head_losses(self._logits, hidden, labels, chunk, self._entropies)
        return losses

    def running(self) -> AbstractContextManager[None]:
        """Make layers that run inside the block prepare for their backward passes."""
        return nullcontext() if self.layerwise is None else self.layerwise.running()

    @contextmanager
    def watched(self, around: Callable[[HeadFn, mx.array], Sequence[mx.array]]) -> Iterator[None]:
        """Inside the block, call `around(head, hidden)` in place of a split model's head."""
        self._around_head = around
        try:
            yield
        finally:
            self._around_head = None

    def _whole_losses(self, inputs: StepInputs) -> mx.array:
        """Return the losses (P,) by a model whose head cannot run apart."""
        losses = cross_entropies(self.model, inputs.tokens, inputs.labels, self._temperature)
        return losses.reshape(-1)[inputs.positions]

    def _hidden(self, inputs: StepInputs) -> mx.array:
        """Return the backbone's output (B T, H)."""
        caches = None if inputs.layout is None else self._backbone_and_head.packed_caches()
        hidden = self._backbone_and_head.hidden(inputs.tokens, caches)
        return hidden.reshape(-1, hidden.shape[-1])

    def _head(self, labels: mx.array) -> HeadFn:
        if self._linear_head is not None and (weight := self._backbone_and_head.weight) is not None:
            losses = partial(self._linear_head.trained_head_losses, weight)
            return lambda hidden: [
                losses(at_temperature(hidden, self._temperature), labels, **self._vocabulary)
            ]
        return trained_head(self._logits, labels, self.execution.loss_chunk, self._entropies)

    def _logits(self, hidden: mx.array) -> mx.array:
        return at_temperature(self._backbone_and_head.logits(hidden), self._temperature)

    def turn_dropout_off(self) -> None:
        """Turn dropout off for calls of the model, until the next pass over a micro-batch."""
        self._dropout.set(None, None)

    def _set_dropout(self, inputs: StepInputs) -> None:
        """Set the dropout keys, and the positions in a packed sequence."""
        layout = inputs.layout
        positions = None if layout is None else mx.array(layout.positions.astype(np.uint32))
        self._dropout.set(inputs.keys, positions)
