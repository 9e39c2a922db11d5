"""The memory of a step in MLX's own graph, see `MemoryUse`, and of an evaluation."""

from dataclasses import dataclass, replace
from math import ceil

from mlxtune.core.steps.memory_in_flight import GraphLimits, QueuedWork
from mlxtune.core.steps.memory_terms import (
    BatchLoad,
    Entries,
    MemoryOptions,
    ModelShapes,
    head_states,
    held_logits,
)

# The largest and smallest number of vocabulary rows in a block of the head, and the largest number
# of logits in a block.
_VOCABULARY_BLOCK, _MIN_VOCABULARY_BLOCK, _BLOCK_LOGITS = 4096, 512, 1 << 21
# The numbers of blocks in memory, of cast weights and of logits, and the maximum number of copies
# of all logits.
_CASTS, _LOGIT_BLOCKS, _LINEAR_LOGITS = 5, 9, 2
# The number of copies of a chunk's logits that cross-entropy and its gradient hold, and the number
# of copies not yet freed when the backward passes of layers begin.
LOGITS, _UNFREED_LOGITS = 5, 2
# The number of gradients as wide as a layer's widest product, and the number as wide as its input,
# that the layer's backward pass holds at the same time.
GRADIENTS = 3
# The number of copies of a quantised matrix while it is unpacked.
_UNPACKED_COPIES = 2
# The number of copies of its products that a layer keeps in MLX's own graph, and the number of
# arrays as wide as its input.
_COPIES, _WIDTHS = 2, 4
# The number of copies of the experts' inputs and outputs that a layer's backward pass holds.
_GATHERED_COPIES = 2
# Arrays as wide as a layer's convolution: the number that its backward pass holds, and the number
# that the layer keeps.
_CONVOLUTION_ARRAYS, _KEPT_CONVOLUTION_ARRAYS = 4, 5
# The forward and backward passes of a layer, counted in the graph of Qwen3 with two LoRA matrices
# and packed examples: kernels; bytes allocated and freed, for each byte that the layer keeps; array
# entries read, for each entry allocated; and how often each weight is read.
_KERNELS, _FREED_PER_KEPT_BYTE, _READS_PER_ENTRY, _READS_PER_WEIGHT = 106, 3.5, 2, 2
# A batch of an evaluation: the numbers of copies of a layer's outputs, of attention's scores if
# they are kept, and of a chunk's logits, and the number of kernels in a layer's forward pass.
_OUTPUTS, _SCORES, _FORWARD_LOGITS, _FORWARD_KERNELS = 4, 2, 5, 35
# The head, with its gradient: kernels for each chunk or block, and copies of all logits that it
# allocates in 16 bits (in blocks, `_LINEAR_LOGITS`).
_HEAD_KERNELS, _HEAD_LOGITS = 14, 3


def vocabulary_block(positions: int) -> int:
    """Return the number of vocabulary rows in a block of a linear head, in MLX's own graph."""
    return max(_MIN_VOCABULARY_BLOCK, min(_VOCABULARY_BLOCK, _BLOCK_LOGITS // max(positions, 1)))


def queued_bytes(shapes: ModelShapes, load: BatchLoad) -> int:
    """Return the bytes that a step's queued operations hold; 0 without a limit of graphs."""
    if shapes.graphs is None:
        return 0
    kept_values = sum(_kept_in_full(shapes, load))
    work = QueuedWork(
        operations=_KERNELS * shapes.layers,
        allocated=int(_FREED_PER_KEPT_BYTE * shapes.itemsize * kept_values),
        read=int(_READS_PER_ENTRY * (1 + _FREED_PER_KEPT_BYTE) * kept_values)
        + _READS_PER_WEIGHT * shapes.matmuls * shapes.hidden,
    )
    return shapes.graphs.queued_bytes(work)


def head_queued_bytes(shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad) -> int:
    """Return the bytes that a head's queued operations hold; 0 without a limit of graphs."""
    if shapes.graphs is None or not execution.separate_head:
        return 0
    positions, _ = head_states(shapes, execution, load)
    logits, weights = shapes.vocab * positions, shapes.vocab * shapes.hidden
    if GraphMemory().holds_logits(shapes):
        chunks = ceil(positions / execution.loss_chunk)
        allocated, weights = _HEAD_LOGITS * logits, weights * chunks
    else:
        chunks = ceil(shapes.vocab / vocabulary_block(positions))
        allocated = _LINEAR_LOGITS * logits
    read = _READS_PER_ENTRY * allocated + _READS_PER_WEIGHT * weights
    work = QueuedWork(_HEAD_KERNELS * chunks, shapes.itemsize * allocated, read)
    return shapes.graphs.queued_bytes(work)


def _kept_in_full(shapes: ModelShapes, load: BatchLoad) -> Entries:
    # Products, functions of products, inputs and residuals.
    width = _COPIES * shapes.matmuls + shapes.scaled + _WIDTHS * shapes.inputs
    tokens = load.tokens * (width + shapes.gathered + shapes.mixed)
    tokens += load.padded_tokens * shapes.looped
    # Recurrences keep some of these arrays with examples side by side, padding included.
    tokens += _KEPT_CONVOLUTION_ARRAYS * shapes.mixed * (load.padded_tokens - load.tokens)
    scores = load.scores if shapes.holds_scores(load) else 0
    return Entries(0, tokens, shapes.scores * scores)


class GraphMemory:
    casts_quantized = False
    head_copies = 4

    def kept_entries(
        self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad
    ) -> Entries:
        """Return the entries that all layers keep from their forward to their backward passes."""
        if execution.recompute:
            return Entries(0, load.tokens * shapes.inputs, 0)
        return _kept_in_full(shapes, load)

    def layer_entries(
        self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad
    ) -> Entries:
        """Return the working entries of a layer's backward pass, in addition to kept entries."""
        gradients = GRADIENTS * (shapes.widest_matmul + shapes.hidden)
        gradients += _GATHERED_COPIES * shapes.layer_gathered
        mixed = load.padded_tokens * _CONVOLUTION_ARRAYS * shapes.layer_mixed
        scores = shapes.layer_scores * load.scores if shapes.holds_scores(load) else 0
        if mixed > scores:
            # The layer has a recurrence, which sees all examples side by side, and no attention.
            load, scores = replace(load, tokens=load.padded_tokens), 0
        tokens = load.tokens * gradients + (0 if scores else mixed)
        if execution.recompute:
            again = _kept_in_full(shapes.with_layers(1), load)
            tokens, scores = tokens + again.tokens, scores + again.scores
        fixed = _UNPACKED_COPIES * max(shapes.unpacked, shapes.largest_cast) + shapes.layer_looped
        return Entries(fixed, tokens, scores)

    def unmeasured_entries(
        self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad
    ) -> int:
        """Return the number of the head's unfreed entries, which passes without a head omit."""
        positions, _ = head_states(shapes, execution, load)
        logits = held_logits(execution, positions, shapes)
        if execution.separate_head and not self.holds_logits(shapes):
            logits = min(logits, vocabulary_block(positions) * positions)
        return _UNFREED_LOGITS * logits

    def head_entries(self, shapes: ModelShapes, execution: MemoryOptions, load: BatchLoad) -> int:
        """Return the number of working entries of the head, in addition to kept entries."""
        positions, hidden = head_states(shapes, execution, load)
        if execution.separate_head and not self.holds_logits(shapes):
            rows = vocabulary_block(positions)
            casts = min(_CASTS * rows, shapes.vocab) if shapes.head_cast else 0
            logits = min(_LOGIT_BLOCKS * rows, _LINEAR_LOGITS * shapes.vocab)
            return hidden + casts * shapes.hidden + logits * positions
        return hidden + shapes.head_cast + LOGITS * held_logits(execution, positions, shapes)

    def holds_logits(self, shapes: ModelShapes) -> bool:
        """Return whether the head holds logits: it is 16-bit, or is not a single matmul."""
        return shapes.itemsize != 4 or not shapes.plain_head


@dataclass(frozen=True)
class EvaluationMemory:
    """The sizes of a loaded model that decide the memory of its evaluation's batches.

    An evaluation keeps nothing for a backward pass, and runs all layers, perhaps of a model
    without LoRA. `widest_layer` is the summed output width of a layer's matmuls. With `in_blocks`,
    the head computes logits in blocks of the vocabulary. `graphs` is None if the device queues no
    graphs. The estimate depends only on sizes, so that the batches are always the same.
    """

    layers: int
    widest_layer: int
    heads: int
    vocab: int
    itemsize: int
    in_blocks: bool
    graphs: GraphLimits | None

    def estimate(self, load: BatchLoad, loss_chunk: int) -> int:
        """Estimate how many bytes a padded batch takes, with attention's scores kept."""
        tokens = max(load.tokens, load.examples * load.width)
        entries = _OUTPUTS * self.widest_layer * tokens + _SCORES * self.heads * load.scores
        logits = loss_chunk * self.vocab
        if self.in_blocks:
            logits = min(logits, load.positions * vocabulary_block(load.positions))
        return 4 * _FORWARD_LOGITS * logits + max(self.itemsize * entries, self._queued(entries))

    def _queued(self, entries: int) -> int:
        """Return the bytes that queued operations hold of layers that allocate `entries` each."""
        if self.graphs is None:
            return 0
        allocated = self.layers * self.itemsize * entries
        work = QueuedWork(
            _FORWARD_KERNELS * self.layers, allocated, _READS_PER_ENTRY * self.layers * entries
        )
        return self.graphs.queued_bytes(work)
