"""What a micro-batch takes of memory, counted from the model's shapes.

It has its peak either in the head or in the backward pass of a layer, where it holds

    weights      as stored, with the LoRA matrices
    optimizer    the gradients of the step and of the micro-batch, and AdamW's two moments
    activations  what each layer keeps for its backward pass, and what one layer works with
    head         logits, or the block of them that is held, and a cast copy of the weights
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.shapes import Load, ModelShapes

# Rows of the vocabulary that the CPU's head casts at once, and how many casts stand at once.
_VOCABULARY_BLOCK, _BLOCKS = 4096, 2
# Copies of the logits of a chunk that cross-entropy and its gradient hold in MLX's own graph, and
# by the CPU's own functions.
_LOGITS, _CPU_LOGITS = 5, 2
# Of a layer in MLX's own graph: its products, half of which are kept once more as what functions
# of them give (rotated, gated), and its input, the normed input and the residual in between.
_GRAPH_PRODUCTS, _GRAPH_HIDDEN = 1.5, 3
# The products and what functions of them give, where a layer's forward pass is run again, and what
# LoRA adds to its own.
_AGAIN_PRODUCTS, _AGAIN_UPDATES = 3, 1.5
# What DoRA adds in the CPU's own functions: its scaled products, and the gradients of these.
_SCALED = 2
# Gradients that the backward pass of a layer holds at once: three as wide as its widest product,
# and three as wide as its input.
_GRADIENTS = 3
# Copies of a quantised matrix while it is unpacked.
_UNPACKED = 2
# Copies of the scores of one layer that its backward pass holds where attention holds scores.
_SCORES = 3


@dataclass(frozen=True)
class Prediction:
    """The peak of a micro-batch in bytes, and what it is made of."""

    weights: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return self.weights + self.optimizer + self.activations + self.head


def predict(shapes: ModelShapes, execution: Execution, load: Load) -> Prediction:
    """Return what a micro-batch takes at its peak."""
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
        """Return what all layers keep."""
        if execution.recompute:
            return load.tokens * shapes.inputs
        widths = int(_GRAPH_PRODUCTS * shapes.products) + _GRAPH_HIDDEN * shapes.inputs
        widths += shapes.read + shapes.scaled
        scores = shapes.heads * shapes.layers * load.scores if execution.holds_scores else 0
        # Each pass through the model casts for itself.
        casts = shapes.cast * (2 if load.prefix else 1)
        return load.tokens * widths + scores + casts

    def in_layer(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return what the backward pass of one layer works with."""
        widths = _GRADIENTS * (shapes.widest_product + shapes.hidden)
        matrices = _UNPACKED * shapes.unpacked
        if execution.recompute:
            widths += _AGAIN_PRODUCTS * shapes.layer_products + int(_AGAIN_UPDATES * shapes.updated)
            widths += _GRAPH_HIDDEN * shapes.hidden
            matrices += shapes.layer_cast
        scores = _SCORES * shapes.heads * load.scores if execution.holds_scores else 0
        return load.tokens * widths + scores + matrices

    def in_head(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return what the head works with: hidden states, logits and a cast weight."""
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
        """Return what all layers keep: inputs, and products but the last, which is as wide."""
        return load.tokens * (shapes.inputs if execution.recompute else shapes.products)

    def in_layer(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return what the backward pass of one layer works with."""
        # About as much as the products lies between them, and is made again.
        widths = shapes.layer_products * (2 if execution.recompute else 1) + shapes.hidden
        widths += _GRADIENTS * (shapes.widest_product + shapes.hidden)
        widths += _SCALED * shapes.updated if shapes.scaled else 0
        scores = _SCORES * shapes.heads * load.scores if execution.holds_scores else 0
        return load.tokens * widths + scores + (shapes.largest_matrix if shapes.cast else 0)

    def in_head(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return what the head works with; a linear one holds no logits."""
        positions, hidden = _head_states(shapes, execution, load)
        if execution.split_head and shapes.plain_head:
            return hidden + (_BLOCKS * _VOCABULARY_BLOCK * shapes.hidden if shapes.head_cast else 0)
        copies = _CPU_LOGITS if shapes.stored_itemsize else _LOGITS
        return hidden + shapes.head_cast + copies * _logits(execution, positions, shapes)

    def holds_logits(self, shapes: ModelShapes) -> bool:
        """Return whether the head is more than one product."""
        return not shapes.plain_head
