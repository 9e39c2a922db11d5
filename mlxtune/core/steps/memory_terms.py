"""The terms of a micro-batch's memory, from sizes, and their correction by measurements.

Memory peaks either in the head or in the backward pass of a layer, and consists of

    weights      as stored, with the LoRA matrices
    optimizer    the gradients of the step and of the micro-batch, and AdamW's two moments
    activations  arrays kept for the backward passes of layers, and working arrays of one layer;
                 the caches of answers while they are sampled
    head         logits, or one block of logits, and a cast copy of the weights
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple, Protocol

from mlxtune.core.steps.memory_in_flight import GraphLimits
from mlxtune.core.steps.micro_batch import MicroBatch
from mlxtune.core.steps.pack import StepLengths


def lora_bytes(parameters: int) -> int:
    """Return the bytes of the LoRA matrices, or of their gradients: float32 in any model."""
    return 4 * parameters


def moment_bytes(parameters: int) -> int:
    """Return the bytes of AdamW's two moments of the LoRA matrices."""
    return 2 * lora_bytes(parameters)


@dataclass(frozen=True)
class Factors:
    """Ratios of measured to estimated bytes, for bytes that grow with tokens or with scores.

    `fixed` is the measured number of fixed bytes; without it, the estimated number applies.
    """

    tokens: float = 1.0
    scores: float = 1.0
    fixed: int | None = None

    def is_sound(self) -> bool:
        values = (self.tokens, self.scores, self.fixed or 0)
        return all(isinstance(value, int | float) and 0 <= value < 1 << 50 for value in values)

    def of(self, entries: Entries, itemsize: int) -> int:
        fixed = itemsize * entries.fixed if self.fixed is None else self.fixed
        grown = self.tokens * entries.tokens + self.scores * entries.scores
        return fixed + ceil(itemsize * grown)


@dataclass(frozen=True)
class MemoryCorrection:
    """The factors by which the measured memory of short passes differs from the estimate.

    `kept` is for the values that layers keep, `working` for one layer's backward pass, and `again`
    for a backward pass that first runs its layer again.
    """

    kept: Factors = field(default_factory=Factors)
    working: Factors = field(default_factory=Factors)
    again: Factors = field(default_factory=Factors)

    @classmethod
    def of(cls, content: Any) -> MemoryCorrection | None:
        try:
            factors = {name: Factors(**each) for name, each in content.items()}
            measured = cls(**factors)
        except (AttributeError, TypeError):
            return None
        return measured if all(map(Factors.is_sound, factors.values())) else None


@dataclass(frozen=True)
class ModelShapes:
    """The sizes of a model with LoRA, in array entries unless bytes are mentioned.

    Layers are counted from the first layer with LoRA onwards, and "all layers" means these.

    weights          bytes of the stored base
    stored_itemsize  bytes per stored entry; 0 if the base is quantised
    trainable        LoRA parameters
    itemsize         bytes per entry of the compute dtype
    hidden, vocab    widths of the hidden states and of the logits
    layers           number of layers
    matmuls          output width of the linear layers and convolutions of all layers
    layer_matmuls    the largest such width of one layer, with its experts' gathered inputs
    widest_matmul    the largest output width of one linear layer
    updated          the largest width of one layer's outputs with LoRA
    largest_cast     the largest matrix that is cast for a matmul
    unpacked         the largest quantised matrix that is unpacked for a matmul
    head_cast        the head, if it is cast
    plain_head       whether the head is a single matmul
    heads, head_size attention's heads and their size
    scores           copies of one head's scores that MLX's graph keeps in all layers
    layer_scores     copies that one layer's backward pass adds for examples wider than `window`
    held_scores      copies that the CPU's functions hold
    gathered         width of the inputs that the experts of all layers gather
    layer_gathered   the largest width of one layer's gathered inputs and outputs
    mixed            channels of the convolutions of all layers
    layer_mixed      the largest number of channels in one layer
    looped           entries per token that loops over tokens keep in all layers
    layer_looped     the most entries that one layer's loop holds for a block of tokens
    scaled           width of all outputs that DoRA scales
    graphs           limits of the graphs that the device queues; None counts no buffers in flight
    measured         correction of the estimate by measured passes
    """

    weights: int
    stored_itemsize: int
    trainable: int
    itemsize: int
    hidden: int
    vocab: int
    layers: int
    matmuls: int
    layer_matmuls: int
    widest_matmul: int
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
    graphs: GraphLimits | None = None
    measured: MemoryCorrection | None = None

    @property
    def inputs(self) -> int:
        """The total width of the inputs of all `layers`."""
        return self.layers * self.hidden

    def with_layers(self, layers: int) -> ModelShapes:
        """Return the shapes with LoRA on the last `layers` layers only."""
        fraction = layers / self.layers
        names = ("trainable", "matmuls", "mixed", "looped", "scaled", "scores", "gathered")
        fewer: dict[str, Any] = {name: int(getattr(self, name) * fraction) for name in names}
        return replace(self, layers=layers, **fewer)

    def holds_scores(self, load: BatchLoad) -> bool:
        """Return whether attention keeps scores for examples as wide as this load's."""
        return load.width > self.window


@dataclass(frozen=True)
class BatchLoad:
    """The load of a micro-batch: `tokens` run through the model, `positions` through its head.

    Operations that mix tokens, such as attention, run `examples` examples padded to `width` tokens.
    """

    examples: int
    width: int
    positions: int
    tokens: int

    @classmethod
    def single(cls, tokens: int, positions: int) -> BatchLoad:
        return cls(1, tokens, positions, tokens)

    @property
    def scores(self) -> int:
        return self.examples * self.width**2

    @property
    def padded_tokens(self) -> int:
        """The number of tokens of the examples side by side, padding included."""
        return self.examples * self.width

    @property
    def repeated(self) -> int:
        """The number of tokens that side-by-side examples add: repeated prefixes and padding."""
        return max(self.examples * self.width - self.tokens, 0)


def load_of(micro_batch: MicroBatch, lengths: StepLengths) -> BatchLoad:
    positions = sum(lengths.supervised[i] for i in micro_batch.examples)
    return BatchLoad(len(micro_batch.examples), micro_batch.width, positions, micro_batch.tokens)


class MemoryOptions(Protocol):
    """The options of an `Execution` that its memory depends on."""

    @property
    def separate_head(self) -> bool: ...

    @property
    def recompute(self) -> bool: ...

    @property
    def loss_chunk(self) -> int: ...


def head_states(shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad) -> tuple[int, int]:
    """Return how many positions a head has, and how many entries its states and gradients take."""
    positions = load.positions if execution.separate_head else load.tokens
    return positions, shapes.hidden * (3 * load.tokens + 4 * positions)


def held_logits(execution: MemoryOptions, positions: int, shapes: ModelShapes) -> int:
    """Return the number of logits that a head holds at the same time."""
    held = min(positions, execution.loss_chunk) if execution.separate_head else positions
    return shapes.vocab * held


class Entries(NamedTuple):
    """Numbers of array entries: fixed, growing with tokens, and growing with attention scores."""

    fixed: int
    tokens: int
    scores: int


class MemoryUse(Protocol):
    """How operations use memory, in entries of arrays of the compute dtype.

    `casts_quantized` says whether quantised matrices are cast one at a time. If not, each is
    unpacked for its matmul, the head's matrix in `head_copies` copies.
    """

    casts_quantized: bool
    head_copies: int

    def kept_entries(
        self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad
    ) -> Entries:
        """Return the entries that all layers keep from their forward to their backward passes."""

    def layer_entries(
        self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad
    ) -> Entries:
        """Return the entries of one layer's backward pass, in addition to kept entries."""

    def unmeasured_entries(
        self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad
    ) -> int:
        """Return the number of the head's entries that measurements without a head leave out."""

    def head_entries(self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad) -> int:
        """Return the number of working entries of the head, in addition to kept entries."""

    def holds_logits(self, shapes: ModelShapes) -> bool:
        """Return whether the head holds the logits of a chunk of positions."""


@dataclass(frozen=True)
class Prediction:
    """The predicted peak memory of a micro-batch in bytes, by part."""

    weights: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations + self.head
