"""The memory of a micro-batch, counted from the model's shapes.

It peaks either in the head or in the backward pass of a layer, and consists of

    weights      as stored, with the LoRA matrices
    optimizer    the gradients of the step and of the micro-batch, and AdamW's two moments
    activations  what each layer keeps for its backward pass, and what one layer works with
    head         logits, or the block of them that is held, and a cast copy of the weights
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.shapes import Load, ModelShapes

# Rows of the vocabulary that the CPU's head casts at once, and how many casts exist at once.
_VOCABULARY_BLOCK, _BLOCKS = 4096, 2
# Copies of a chunk's logits that cross-entropy and its gradient hold, in MLX's own graph and in the
# CPU's own functions.
_LOGITS, _CPU_LOGITS = 5, 2
# For a layer in MLX's own graph: its products, half of which are kept a second time as outputs of
# functions (rotated, gated), and its input, the normed input and the residual in between.
_GRAPH_PRODUCTS, _GRAPH_HIDDEN = 1.5, 3
# The products and the outputs of functions of them, if a layer is recomputed, and LoRA's share.
_AGAIN_PRODUCTS, _AGAIN_UPDATES = 3, 1.5
# What DoRA adds in the CPU's own functions: its scaled products, and the gradients of these.
_SCALED = 2
# Gradients that the backward pass of a layer holds at once: three as wide as its widest product,
# and three as wide as its input.
_GRADIENTS = 3
# Copies of a quantised matrix while it is unpacked.
_UNPACKED = 2
# Copies of one layer's scores that its backward pass holds, if attention holds scores.
_SCORES = 3


@dataclass(frozen=True)
class Prediction:
    """The peak of a micro-batch in bytes, by part."""

    weights: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        """The most bytes held at once."""
        return self.weights + self.optimizer + self.activations + self.head


def predict(shapes: ModelShapes, execution: Execution, load: Load) -> Prediction:
    """Return the memory of a micro-batch at its peak."""
    memory, size = execution.operations.memory, shapes.itemsize
    kept = size * memory.kept(shapes, execution, load)
    # In float32: the matrices themselves; two moments, and two gradients.
    weights, optimizer = shapes.weights + 4 * shapes.trainable, 4 * 4 * shapes.trainable
    in_layer = kept + size * memory.in_layer(shapes, execution, load)
    in_head = size * memory.in_head(shapes, execution, load)
    return max(
        Prediction(weights, optimizer, in_layer, 0),
        Prediction(weights, optimizer, kept, in_head),
        key=lambda moment: moment.total,
    )


def _head_states(shapes: ModelShapes, execution: Execution, load: Load) -> tuple[int, int]:
    """Return the positions the head runs on, and the entries of hidden states and gradients."""
    positions = load.positions if execution.split_head else load.tokens
    return positions, shapes.hidden * (3 * load.tokens + 4 * positions)


def _logits(execution: Execution, positions: int, shapes: ModelShapes) -> int:
    """Return the entries of the logits that are held at once."""
    return shapes.vocab * (
        min(positions, execution.loss_chunk) if execution.split_head else positions
    )


class GraphMemory:
    """The memory of MLX's own graph."""

    casts_quantized = False
    head_copies = 4

    def kept(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return the entries that all layers keep."""
        if execution.recompute:
            return load.tokens * shapes.inputs
        widths = int(_GRAPH_PRODUCTS * shapes.products) + _GRAPH_HIDDEN * shapes.inputs
        widths += shapes.read + shapes.scaled
        scores = shapes.heads * shapes.layers * load.scores if execution.holds_scores else 0
        # Each pass through the model makes its own casts.
        casts = shapes.cast * (2 if load.prefix else 1)
        return load.tokens * widths + scores + casts

    def in_layer(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return the working entries of one layer's backward pass."""
        widths = _GRADIENTS * (shapes.widest_product + shapes.hidden)
        matrices = _UNPACKED * shapes.unpacked
        if execution.recompute:
            widths += _AGAIN_PRODUCTS * shapes.layer_products + int(_AGAIN_UPDATES * shapes.updated)
            widths += _GRAPH_HIDDEN * shapes.hidden
            matrices += shapes.layer_cast
        scores = _SCORES * shapes.heads * load.scores if execution.holds_scores else 0
        return load.tokens * widths + scores + matrices

    def in_head(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return the working entries of the head: hidden states, logits and a cast weight."""
        positions, hidden = _head_states(shapes, execution, load)
        return hidden + shapes.head_cast + _LOGITS * _logits(execution, positions, shapes)

    def holds_logits(self, shapes: ModelShapes) -> bool:
        """Return True: MLX's cross-entropy takes logits."""
        return True


class KernelMemory:
    """The memory of the CPU's kernels, which keep the products of a layer."""

    casts_quantized = True
    head_copies = 1

    def kept(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return the entries that all layers keep: inputs, and products except the last."""
        return load.tokens * (shapes.inputs if execution.recompute else shapes.products)

    def in_layer(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return the working entries of one layer's backward pass."""
        # The recomputed values between the products take about as much as the products.
        widths = shapes.layer_products * (2 if execution.recompute else 1) + shapes.hidden
        widths += _GRADIENTS * (shapes.widest_product + shapes.hidden)
        widths += _SCALED * shapes.updated if shapes.scaled else 0
        scores = _SCORES * shapes.heads * load.scores if execution.holds_scores else 0
        return load.tokens * widths + scores + (shapes.largest_matrix if shapes.cast else 0)

    def in_head(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return the working entries of the head; a linear head holds no logits."""
        positions, hidden = _head_states(shapes, execution, load)
        if execution.split_head and shapes.plain_head:
            return hidden + (_BLOCKS * _VOCABULARY_BLOCK * shapes.hidden if shapes.head_cast else 0)
        copies = _CPU_LOGITS if shapes.stored_itemsize else _LOGITS
        return hidden + shapes.head_cast + copies * _logits(execution, positions, shapes)

    def holds_logits(self, shapes: ModelShapes) -> bool:
        """Return whether the head is more than one product."""
        return not shapes.plain_head
