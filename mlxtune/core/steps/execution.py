"""How a step is computed: its operations, micro-batches and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.memory_terms import BatchLoad, MemoryUse
from mlxtune.core.steps.pack import plan_packs
from mlxtune.core.steps.padded_groups import Group, plan_step
from mlxtune.core.steps.rounding import NOT_ROUNDED, Rounding


class LinearHead(Protocol):
    """The cross-entropy, computed in blocks, of an output head that is one matrix product.

    `weight` is (V, H), `hidden` float32 (P, H) and `targets` int32 (P,); the losses are float32
    (P,). Workers that split `weight` by rows also pass their parts as `vocabulary`.
    """

    def trained_head_losses(self, weight: Any, hidden: Any, targets: Any) -> Any:
        """Return the losses; their gradient reaches `hidden`."""

    def head_losses(self, weight: Any, hidden: Any, targets: Any) -> Any:
        """Return the losses, without a gradient."""


class Operations(Protocol):
    """The operations that compute a step on a device; arrays and modules are the backend's.

    `by_segments` says whether causal attention keeps the examples of a packed line separate, `lazy`
    whether building a graph computes nothing, and `joins` whether projections of the same input run
    together in training.
    """

    by_segments: bool
    lazy: bool
    joins: bool
    memory: MemoryUse

    def load(self) -> None:
        """Load libraries and kernels ahead of their first use."""

    def serves(self, dtype: Any) -> bool:
        """Return whether the operations support hidden states of this dtype (None: unknown)."""

    def linear_head(self, dtype: Any) -> LinearHead | None:
        """Return the blockwise loss of a single-product head; None if this dtype has none."""

    def prepare(self, model: Any) -> Callable[[], None]:
        """Make a model compute with these operations; return a function that restores the model."""

    def attention_kernels(self, dtype: Any) -> Any:
        """Return a function from a layer's heads to kernels around attention; None for none."""

    def cross_entropies(self, logits: Any, targets: Any) -> Any:
        """Return the losses, float32 (P,), in nats, for logits (P, V) and targets int32 (P,)."""

    def layer_passes(self, recompute: bool) -> Any:
        """Return an object that runs layers in less memory; None if MLX runs them as usual."""


@dataclass(frozen=True)
class Execution:
    """How a step is computed. No field changes the step's loss or gradient beyond float rounding.

    `operations` compute the step. `micro_batch_tokens` limits the number of tokens that run through
    the model together. `split_head` runs the head on supervised positions only, `loss_chunk` at a
    time. `packs` lays examples end to end instead of padding them, and runs shared prefixes once.
    `recompute` keeps only the input of each layer, and runs the layer again in the backward pass.
    `fixed_cost` is the cost of a micro-batch beyond its tokens, in units of one token's time.
    `rounding` is applied to packed lines.
    """

    operations: Operations
    micro_batch_tokens: int = 2048
    split_head: bool = True
    packs: bool = True
    recompute: bool = False
    loss_chunk: int = 256
    fixed_cost: int = 32
    rounding: Rounding = NOT_ROUNDED

    def plan(self, examples: Sequence[Example], *, keyed: bool = False) -> list[Group]:
        if self.packs:
            tokens, fixed, rounding = self.micro_batch_tokens, self.fixed_cost, self.rounding
            return plan_packs(examples, tokens, fixed, keyed=keyed, rounding=rounding)
        return plan_step(examples, self.micro_batch_tokens, self.fixed_cost)

    def rounded(self, load: BatchLoad) -> BatchLoad:
        """Return the load of one example, with the padding of its line."""
        if not self.packs:
            return load
        added = self.rounding.padding(load.tokens, self.micro_batch_tokens)
        width = self.rounding.rounded_width(load.width + added)
        return replace(load, tokens=load.tokens + added, width=width)
