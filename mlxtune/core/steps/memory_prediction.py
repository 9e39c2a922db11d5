"""What a micro-batch takes of memory, counted from the model's shapes.

It has its peak either in the head or in the backward pass of a layer, where it holds

    weights      as stored, with the LoRA matrices
    optimizer    the gradients of the step and of the micro-batch, and AdamW's two moments
    activations  what each layer keeps for its backward pass, and what one layer works with
    head         logits, or the block of them that is held, and a cast copy of the weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.groups import Group
from mlxtune.core.steps.pack import Packed

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
class ModelShapes:
    """What memory depends on. Sizes are bytes, numbers of entries otherwise.

    `weights` is what the base takes as stored, in `stored_itemsize` an entry (0 where quantised);
    `itemsize` is that of the compute dtype. `trainable` counts the LoRA parameters. `layers` are
    those from the first that is trained on; `products` is the width of the outputs of all their
    linear layers together, `layer_products` of those of one, `widest_product` of a single one.
    `updated` is that of the linear layers with LoRA of one layer, `read` the width of the inputs
    of all that have LoRA, of those which are no hidden states. `scaled` is the width of the outputs
    of all linear layers that DoRA scales.
    `cast` and `layer_cast` are the entries of their matrices that are cast for each use, all and of
    one layer, `head_cast` those of the head. `plain_head` tells whether the head is one product.
    `unpacked` are the entries of the largest quantised matrix that is made for a product alone.
    """

    weights: int
    stored_itemsize: int
    trainable: int
    itemsize: int
    hidden: int
    vocab: int
    heads: int
    layers: int
    products: int
    layer_products: int
    widest_product: int
    updated: int
    read: int
    largest_matrix: int
    cast: int
    layer_cast: int
    head_cast: int
    plain_head: bool
    scaled: int = 0
    unpacked: int = 0

    @property
    def inputs(self) -> int:
        """Widths of the inputs of all trained layers."""
        return self.layers * self.hidden


@dataclass(frozen=True)
class Way:
    """How a step is run, as far as memory depends on it.

    `kernels`: by the CPU's own functions, which keep the products of a layer. `holds_scores`:
    attention holds the scores of a layer. `split_head`: no logits of unsupervised tokens.
    `packs_up_to`: examples up to this length stand end to end in one line.
    """

    micro_batch_tokens: int
    recompute: bool = False
    loss_chunk: int = 256
    kernels: bool = False
    holds_scores: bool = False
    split_head: bool = True
    packs_up_to: int = 0


@dataclass(frozen=True)
class Load:
    """What a micro-batch runs: a prefix once, then `lines` of `width` tokens each."""

    lines: int
    width: int
    positions: int
    prefix: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that run through the model."""
        return self.prefix + self.lines * self.width

    @property
    def scores(self) -> int:
        """Scores of one head of attention."""
        return self.prefix**2 + self.lines * self.width * (self.prefix + self.width)


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


def predict(shapes: ModelShapes, way: Way, load: Load) -> Prediction:
    """Return what the largest moment of a micro-batch takes."""
    kept = _kept(shapes, way, load)
    # In float32: the matrices themselves; two moments, and two gradients.
    weights, optimizer = shapes.weights + 4 * shapes.trainable, 4 * 4 * shapes.trainable
    in_layer = Prediction(weights, optimizer, kept + _layer(shapes, way, load), 0)
    in_head = Prediction(weights, optimizer, kept, _head(shapes, way, load))
    return max(in_layer, in_head, key=lambda moment: moment.total)


def _kept(shapes: ModelShapes, way: Way, load: Load) -> int:
    """Return what all layers keep between their forward and backward passes."""
    if way.recompute:
        return shapes.itemsize * load.tokens * shapes.inputs
    if way.kernels:
        # The input of each layer and its products but the last, which is as wide.
        return shapes.itemsize * load.tokens * shapes.products
    widths = int(_GRAPH_PRODUCTS * shapes.products) + _GRAPH_HIDDEN * shapes.inputs + shapes.read
    widths += shapes.scaled
    scores = shapes.heads * shapes.layers * load.scores if way.holds_scores else 0
    # Each pass through the model casts for itself.
    casts = shapes.cast * (2 if load.prefix else 1)
    return shapes.itemsize * (load.tokens * widths + scores + casts)


def _layer(shapes: ModelShapes, way: Way, load: Load) -> int:
    """Return what the backward pass of one layer works with, beyond what is kept."""
    gradients = _GRADIENTS * (shapes.widest_product + shapes.hidden)
    scores = _SCORES * shapes.heads * load.scores if way.holds_scores else 0
    if way.kernels:
        # About as much as the products lies between them, and is made again.
        again = shapes.layer_products * (2 if way.recompute else 1) + shapes.hidden
        again += _SCALED * shapes.updated if shapes.scaled else 0
        cast = shapes.largest_matrix if shapes.cast else 0
        return shapes.itemsize * (load.tokens * (again + gradients) + scores + cast)
    again, cast = 0, 0
    if way.recompute:
        again = _AGAIN_PRODUCTS * shapes.layer_products + int(_AGAIN_UPDATES * shapes.updated)
        again += _GRAPH_HIDDEN * shapes.hidden
        cast = shapes.layer_cast
    cast += _UNPACKED * shapes.unpacked
    return shapes.itemsize * (load.tokens * (again + gradients) + scores + cast)


def _head(shapes: ModelShapes, way: Way, load: Load) -> int:
    """Return what the head holds: hidden states and their gradients, logits, a cast copy."""
    positions = load.positions if way.split_head else load.tokens
    hidden = shapes.hidden * (3 * load.tokens + 4 * positions)
    if way.kernels and shapes.plain_head and way.split_head:
        cast = _BLOCKS * _VOCABULARY_BLOCK * shapes.hidden if shapes.head_cast else 0
        return shapes.itemsize * (hidden + cast)
    at_once = min(positions, way.loss_chunk) if way.split_head else positions
    copies = _CPU_LOGITS if way.kernels and shapes.stored_itemsize else _LOGITS
    return shapes.itemsize * (hidden + shapes.head_cast + copies * at_once * shapes.vocab)


def load_of(group: Group | Packed, examples: Sequence[Example]) -> Load:
    """Return what a group of a step's examples runs."""
    positions = sum(int(examples[i].assistant_mask[1:].sum()) for i in group.examples)
    if isinstance(group, Packed):
        return Load(1, group.tokens, positions)
    return Load(len(group.examples), group.width, positions, group.prefix)


def with_layers(shapes: ModelShapes, layers: int) -> ModelShapes:
    """Return the shapes with LoRA on the last so many layers."""
    share = layers / shapes.layers
    return replace(
        shapes,
        layers=layers,
        trainable=int(shapes.trainable * share),
        products=int(shapes.products * share),
        read=int(shapes.read * share),
        scaled=int(shapes.scaled * share),
        cast=int(shapes.cast * share),
    )
