"""How a step is computed, and the memory of a micro-batch, by sizes and by measured passes.

Memory peaks either in the head or in the backward pass of a layer, and consists of

    weights      as stored, with the LoRA matrices
    optimizer    the gradients of the step and of the micro-batch, and AdamW's two moments
    activations  what each layer keeps for its backward pass, and what one layer works with
    head         logits, or the block of them that is held, and a cast copy of the weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple, Protocol

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import predicted_tokens
from mlxtune.core.steps.groups import Group, plan_step
from mlxtune.core.steps.pack import plan_packs
from mlxtune.core.steps.rounding import NOT_ROUNDED, Rounding


@dataclass(frozen=True)
class Factors:
    """Measured bytes over estimated ones, by tokens and by scores; and the bytes that are fixed.

    Without `fixed`, the estimate has it.
    """

    tokens: float = 1.0
    scores: float = 1.0
    fixed: int | None = None

    def is_sound(self) -> bool:
        values = (self.tokens, self.scores, self.fixed or 0)
        return all(isinstance(each, int | float) and 0 <= each < 1 << 50 for each in values)

    def of(self, entries: Entries, itemsize: int) -> int:
        fixed = itemsize * entries.fixed if self.fixed is None else self.fixed
        grown = self.tokens * entries.tokens + self.scores * entries.scores
        return fixed + ceil(itemsize * grown)


@dataclass(frozen=True)
class Measured:
    """How short passes on the device differ from the estimate.

    `kept` and `working`: what layers keep, and what one works with; `again`: what one works with
    that runs again in the backward pass.
    """

    kept: Factors = field(default_factory=Factors)
    working: Factors = field(default_factory=Factors)
    again: Factors = field(default_factory=Factors)

    @classmethod
    def of(cls, content: Any) -> Measured | None:
        try:
            factors = {name: Factors(**each) for name, each in content.items()}
            found = cls(**factors)
        except (AttributeError, TypeError):
            return None
        return found if all(map(Factors.is_sound, factors.values())) else None


@dataclass(frozen=True)
class ModelShapes:
    """A model with LoRA. Sizes are bytes, all else counts entries of arrays.

    `weights` is the base as stored, at `stored_itemsize` an entry (0 if quantised); `itemsize` is
    the compute dtype's. `trainable` counts the LoRA parameters. `layers` start at the first with
    LoRA; the outputs of all their linear layers are `products` wide together, the outputs of one
    layer `layer_products`, with the inputs that its experts gather, and the output of a single
    linear layer at most `widest_product`. `updated` is the width of one layer's outputs with LoRA,
    `scaled` of all outputs that DoRA scales. `largest_cast` and `unpacked` are the entries of the
    largest matrix that is cast, and of the largest quantised one that is unpacked, for each
    product; `head_cast` the head's. `plain_head`: the head is one product. `heads` of `head_size`
    attend.
    `scores` are the copies of one head's scores that MLX's graph keeps in all layers,
    `layer_scores` those that one layer's backward pass holds besides, if examples are wider
    than `window`; `held_scores` those by the CPU's functions. `gathered` is the width of the
    inputs that the experts of all layers gather, `layer_gathered` of these and of the outputs
    in one layer. `mixed` are the channels of the convolutions of all layers, `layer_mixed` the
    most of one. `looped` are the entries that loops over tokens keep of one, in all layers, and
    `layer_looped` the most that a layer's loop holds of a block of tokens. `measured` corrects the
    estimate by passes that ran.
    """

    weights: int
    stored_itemsize: int
    trainable: int
    itemsize: int
    hidden: int
    vocab: int
    layers: int
    products: int
    layer_products: int
    widest_product: int
    updated: int
    largest_cast: int
    head_cast: int
    plain_head: bool
    heads: int = 1
    head_size: int = 0
    scores: int = 0
    layer_scores: int = 0
    window: int = 0
    held_scores: int = 0
    gathered: int = 0
    layer_gathered: int = 0
    mixed: int = 0
    layer_mixed: int = 0
    looped: int = 0
    layer_looped: int = 0
    scaled: int = 0
    unpacked: int = 0
    measured: Measured | None = None

    @property
    def inputs(self) -> int:
        """Width of the inputs of all layers with LoRA."""
        return self.layers * self.hidden

    def with_layers(self, layers: int) -> ModelShapes:
        """Return the shapes with LoRA on the last `layers` layers only."""
        share = layers / self.layers
        names = ("trainable", "products", "mixed", "looped", "scaled", "scores", "gathered")
        fewer: dict[str, Any] = {name: int(getattr(self, name) * share) for name in names}
        return replace(self, layers=layers, **fewer)

    def holds_scores(self, load: BatchLoad) -> bool:
        """Return whether attention holds the scores of examples as wide as these."""
        return load.width > self.window


@dataclass(frozen=True)
class BatchLoad:
    """The load of a micro-batch: `tokens` run through the model, `positions` through its head.

    Where tokens meet, there are `lines` of `width` tokens, padding included.
    """

    lines: int
    width: int
    positions: int
    tokens: int

    @classmethod
    def single(cls, tokens: int, positions: int) -> BatchLoad:
        return cls(1, tokens, positions, tokens)

    @property
    def scores(self) -> int:
        return self.lines * self.width**2

    @property
    def beside(self) -> int:
        """Tokens where examples stand side by side, padding included."""
        return self.lines * self.width

    @property
    def repeated(self) -> int:
        """Tokens that run once for each example where tokens meet, and once for all elsewhere."""
        return max(self.lines * self.width - self.tokens, 0)


def load_of(group: Group, examples: Sequence[Example]) -> BatchLoad:
    positions = sum(predicted_tokens(examples[i]) for i in group.examples)
    return BatchLoad(len(group.examples), group.width, positions, group.tokens)


def head_states(shapes: ModelShapes, execution: Execution, load: BatchLoad) -> tuple[int, int]:
    """Return the positions the head runs on, and the entries of hidden states and gradients."""
    positions = load.positions if execution.split_head else load.tokens
    return positions, shapes.hidden * (3 * load.tokens + 4 * positions)


def held_logits(execution: Execution, positions: int, shapes: ModelShapes) -> int:
    """Return the logits that a head holds at once."""
    held = min(positions, execution.loss_chunk) if execution.split_head else positions
    return shapes.vocab * held


class Entries(NamedTuple):
    """Entries of arrays: however long the load, by its tokens, and by its attention scores."""

    fixed: int
    tokens: int
    scores: int


class MemoryUse(Protocol):
    """How operations use memory, in entries of arrays of the compute dtype.

    `casts_quantized`: one quantised matrix at a time is cast; else each is unpacked for its
    product, the head in `head_copies` copies.
    """

    casts_quantized: bool
    head_copies: int

    def kept(self, shapes: ModelShapes, execution: Execution, load: BatchLoad) -> Entries:
        """Return the entries that all layers keep from their forward to their backward passes."""

    def in_layer(self, shapes: ModelShapes, execution: Execution, load: BatchLoad) -> Entries:
        """Return the entries of one layer's backward pass, in addition to the kept ones."""

    def unseen(self, shapes: ModelShapes, execution: Execution, load: BatchLoad) -> int:
        """Return the entries that passes without a head do not show."""

    def in_head(self, shapes: ModelShapes, execution: Execution, load: BatchLoad) -> int:
        """Return the working entries of the head, in addition to the kept ones."""

    def holds_logits(self, shapes: ModelShapes) -> bool:
        """Return whether the head holds the logits of a chunk of positions."""


class Operations(Protocol):
    """The operations that compute a step on a device; arrays and modules are the backend's.

    `by_segments`: causal attention itself keeps apart the examples of a line. `lazy`: building a
    graph computes none of it. `joins`: projections of the same input run together in training.
    """

    by_segments: bool
    lazy: bool
    joins: bool
    memory: MemoryUse

    def load(self) -> None:
        """Load libraries and kernels ahead of their first use."""

    def serves(self, dtype: Any) -> bool:
        """Return whether models whose hidden states have this dtype (None: unknown) can be run."""

    def linear_head(self, dtype: Any) -> Any:
        """Return a function for the losses of a head of one product, without its logits.

        None if it is computed like any other.
        """

    def prepare(self, model: Any) -> Callable[[], None]:
        """Make a model compute with these operations; return a function that undoes it."""

    def cross_entropies(self, logits: Any, targets: Any) -> Any:
        """Return the losses, float32 (P,), in nats, for logits (P, V) and targets int32 (P,)."""

    def layer_passes(self, recompute: bool) -> Any:
        """Return a runner of layers that saves memory backward; None leaves them to MLX."""


@dataclass(frozen=True)
class Execution:
    """How a step is computed. Nothing here changes its loss or gradient beyond float rounding.

    `operations` compute it. `micro_batch_tokens` bounds the tokens that run through the model at
    once. `split_head`: run the head on supervised positions only, `loss_chunk` at a time. `packs`:
    lay examples end to end instead of padding them, and run what they start with alike once.
    `recompute`: keep only the input of each layer, and run the layer again in the backward pass.
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
        """Return the load of one example, rounded as it runs."""
        if not self.packs:
            return load
        added = self.rounding.padding(load.tokens, self.micro_batch_tokens)
        width = self.rounding.rounded_width(load.width + added)
        return replace(load, tokens=load.tokens + added, width=width)


@dataclass(frozen=True)
class Prediction:
    """The peak of a micro-batch in bytes, by part."""

    weights: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations + self.head


def predict(shapes: ModelShapes, execution: Execution, load: BatchLoad) -> Prediction:
    """Return the memory of a micro-batch at its peak: an estimate, unless passes were measured."""
    memory, size = execution.operations.memory, shapes.itemsize
    measured = shapes.measured or Measured()
    # Inputs of layers are all that is kept where these run again.
    in_kept = Factors() if execution.recompute else measured.kept
    in_working = measured.again if execution.recompute else measured.working
    kept = in_kept.of(memory.kept(shapes, execution, load), size)
    working = in_working.of(memory.in_layer(shapes, execution, load), size)
    # In float32: the matrices themselves; two moments, and two gradients.
    weights, optimizer = shapes.weights + 4 * shapes.trainable, 4 * 4 * shapes.trainable
    in_layer = kept + working + size * memory.unseen(shapes, execution, load)
    in_head = size * memory.in_head(shapes, execution, load)
    return max(
        Prediction(weights, optimizer, in_layer, 0),
        Prediction(weights, optimizer, kept, in_head),
        key=lambda moment: moment.total,
    )
