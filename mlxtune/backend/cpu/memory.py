"""The memory of a step with the CPU's kernels, in entries of arrays; see `MemoryUse`."""

from mlxtune.core.steps.graph_memory import GRADIENTS, LOGITS
from mlxtune.core.steps.memory_terms import (
    BatchLoad,
    Entries,
    ModelShapes,
    Settings,
    head_states,
    held_logits,
)

# The number of vocabulary rows that the head casts in one block, and the number of blocks held.
_VOCABULARY_BLOCK, _BLOCKS = 4096, 2
# The number of copies of a chunk's logits that cross-entropy and its gradient hold.
_CPU_LOGITS = 2
# The number of scores in a block of attention, over all threads, and the number of queries per head
# in such a block. The backward pass holds _NUMPY_SCORES copies of these scores in numpy, and
# _NUMPY_WIDTHS arrays that are as wide as all heads.
ATTENTION_SCORES, ATTENTION_QUERIES = 1 << 21, 128
_NUMPY_SCORES, _NUMPY_WIDTHS = 2, 3
# DoRA adds two arrays: its scaled products, and their gradients.
_SCALED = 2
# The number of arrays as wide as a layer's convolution that the layer's backward pass holds.
_MIXED = 8


class KernelMemory:
    """The memory of the CPU's kernels, which keep each layer's products."""

    casts_quantized = True
    head_copies = 1

    def kept(self, shapes: ModelShapes, settings: Settings, load: BatchLoad) -> Entries:
        """Return the entries that all layers keep: products, or inputs with `recompute`."""
        if settings.recompute:
            return Entries(0, load.tokens * shapes.inputs, 0)
        return Entries(0, load.tokens * shapes.products + load.repeated * shapes.mixed, 0)

    def in_layer(self, shapes: ModelShapes, settings: Settings, load: BatchLoad) -> Entries:
        """Return the entries of one layer's backward pass, in addition to the kept entries."""
        # The recomputed values between the products take about as much memory as the products.
        widths = shapes.layer_products * (2 if settings.recompute else 1) + shapes.hidden
        widths += GRADIENTS * (shapes.widest_product + shapes.hidden)
        widths += _SCALED * shapes.updated if shapes.scaled else 0
        mixed = _MIXED * shapes.layer_mixed * load.repeated
        scores = shapes.held_scores * load.scores
        return Entries(shapes.largest_cast, load.tokens * widths + mixed, scores)

    def unseen(self, shapes: ModelShapes, settings: Settings, load: BatchLoad) -> int:
        """Return the entries of numpy arrays in attention, which MLX does not count."""
        width = shapes.heads * shapes.head_size
        scores = min(ATTENTION_SCORES, shapes.heads * ATTENTION_QUERIES * load.width)
        return _NUMPY_SCORES * scores + _NUMPY_WIDTHS * load.tokens * width

    def in_head(self, shapes: ModelShapes, settings: Settings, load: BatchLoad) -> int:
        """Return the working entries of the head; a split single-product head holds no logits."""
        positions, hidden = head_states(shapes, settings, load)
        if settings.split_head and shapes.plain_head:
            return hidden + (_BLOCKS * _VOCABULARY_BLOCK * shapes.hidden if shapes.head_cast else 0)
        copies = _CPU_LOGITS if shapes.stored_itemsize else LOGITS
        return hidden + shapes.head_cast + copies * held_logits(settings, positions, shapes)

    def holds_logits(self, shapes: ModelShapes) -> bool:
        """Return whether the head holds logits; a single-product head does not."""
        return not shapes.plain_head
