"""Splits a model into its backbone, which gives hidden states, and its head, which gives logits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.forward.packed_mixers import Mixers
from mlxtune.backend.forward.packing_trial import LayerInputs, trial_texts
from mlxtune.backend.models.packed import PackedCache, laid_out
from mlxtune.backend.models.stored_layers import (
    DequantizedEmbedding,
    DequantizedLinear,
    QuantizedHead,
)
from mlxtune.backend.workers.shards import Vocabulary, VocabularyShard
from mlxtune.errors import one_line

# The largest difference between logits that rounding explains, relative to the largest logit.
_TOLERANCE = 2e-2
# Hidden states scaled up this much reveal any soft-capping of the logits.
_LARGE_SCALE = 1000.0
# The number of vocabulary tokens whose logits are compared with a matmul.
_COMPARED_TOKENS = 1024
# The number of a text's positions at which the head is tried.
_HEAD_POSITIONS = 4


class _BackboneSlot:
    """Replaces the backbone, or its last norm, for one call of the model.

    Without `hidden`, the slot runs the backbone, keeps its `hidden` states, and returns the first
    `positions` of them for the head, by default all. With `hidden`, the slot returns these states.
    """

    def __init__(
        self, backbone: nn.Module, hidden: mx.array | None = None, positions: int | None = None
    ) -> None:
        self._backbone, self._hidden, self._positions = backbone, hidden, positions
        self.hidden: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._hidden is not None:
            return self._hidden
        self.hidden = self._backbone(*args, **options)
        return self.hidden if self._positions is None else self.hidden[:, : self._positions]

    def __getattr__(self, name: str) -> Any:
        # Models with a tied head read the embeddings from the backbone.
        return getattr(self._backbone, name)


class BackboneAndHead:
    """An mlx-lm model whose head, including any soft-capping, can run on chosen positions alone.

    `is_separable` tells whether the split works; if not, the model can only run whole. `weight` (V,
    H) is the weight of a head that is a single matmul, else None. `dtype` is the dtype of the
    hidden states, and `logits_dtype` that of the logits. `vocabulary` has the tokens for which this
    worker computes logits; None means all. `packing_problem` is the reason, found by `try_packing`,
    why packed examples do not work; empty if they do.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._text = getattr(model, "language_model", model)
        self._owner = self._text
        self._name, self._backbone = find_backbone(self._text)
        parts = [
            head.vocabulary for head in find_heads(self._text) if isinstance(head, VocabularyShard)
        ]
        self.vocabulary: Vocabulary | None = parts[0] if parts else None
        self.weight: mx.array | QuantizedHead | None = None
        self.is_separable = False
        self.packing_problem = ""
        self.dtype: mx.Dtype | None = None
        self.logits_dtype: mx.Dtype | None = None
        # Hidden states of a few texts, run separately: inputs of layers, and the backbone's output.
        self._inputs = LayerInputs(model, trial_texts())
        self._alone = mx.array(0.0)
        if isinstance(self._backbone, nn.Module):
            self._compare()
            stack = _stack(self._backbone)
            if not self.is_separable and stack is not None:
                # Gemma 3n's backbone contains the head, after its last norm.
                self._owner, self._name, self._backbone = stack, "norm", stack["norm"]
                self._compare()

    def hidden(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Return the backbone's output (B, T, H) for inputs int32 (B, T).

        `cache` has a PackedCache for each layer.
        """
        # The model's own call runs the head on no positions, which costs nothing.
        slot = _BackboneSlot(self._backbone, positions=0)
        self._call(slot, inputs, cache)
        return slot.hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits (P, V) of hidden states (P, H), for the tokens in `vocabulary`."""
        if self.vocabulary is not None:
            hidden = self.vocabulary.enter(hidden)
        with self._without_layers():
            logits = self._call(_BackboneSlot(self._backbone, hidden[None]), mx.array([[0]]))
        # Unlike indexing, squeeze needs no second array of logits for its gradient.
        return logits.squeeze(0)

    def try_packing(self, mixers: Mixers) -> bool:
        """Turn off `mixers.by_segments` if packed examples need it; return whether they work.

        They work if they give the same results as separate examples.
        """
        if self._try_packed():
            return True
        if not mixers.by_segments:
            return False
        mixers.by_segments = False
        return self._try_packed()

    def _try_packed(self) -> bool:
        """Run packed texts once; set `packing_problem`, and return True if packing works."""
        texts, inputs = self._inputs.texts, self._inputs
        try:
            with laid_out(texts.layout()), inputs.compared():
                packed = self.hidden(mx.array([texts.packed]), self.packed_caches())
            inputs.compare(self._alone, packed)
            self.packing_problem = inputs.problem()
        # Any error may occur: some architectures add positional embeddings, or use other caches.
        except Exception as error:  # noqa: BLE001
            self.packing_problem = one_line(f"{type(error).__name__}: {error}")
        return not self.packing_problem

    def packed_caches(self) -> list[PackedCache]:
        """Return the layers' caches for a packed sequence."""
        return [PackedCache() for _ in self.model.layers]

    def _call(
        self, slot: _BackboneSlot, inputs: mx.array, cache: Sequence[Any] | None = None
    ) -> mx.array:
        # Replacing an entry of the dict keeps the order of the parameters.
        self._owner[self._name] = slot
        try:
            return self._text(inputs, cache=cache) if cache else self._text(inputs)
        finally:
            self._owner[self._name] = self._backbone

    @contextmanager
    def _without_layers(self) -> Iterator[None]:
        """Inside the block, make the layers before the slot return their inputs."""
        layers = self._owner.get("layers")
        if layers:
            self._owner["layers"] = [lambda x, *args, **options: x for _ in layers]
        try:
            yield
        finally:
            if layers:
                self._owner["layers"] = layers

    def _compare(self) -> None:
        """Set `is_separable`, `weight` and the dtypes by comparing backbone and head with the
        model.
        """
        try:
            slot = _BackboneSlot(self._backbone, positions=_HEAD_POSITIONS)
            with self._inputs.kept():
                logits = self._call(slot, mx.array(self._inputs.texts.tokens))[0]
            self._alone, hidden = slot.hidden, slot.hidden[0, :_HEAD_POSITIONS]
            self.dtype, self.logits_dtype = hidden.dtype, logits.dtype
            self.weight = next(
                (w for w in self._candidates() if self._is_head(w, logits, hidden)), None
            )
            apart = logits.shape != hidden.shape and _are_close(logits, self.logits(hidden))
            self.is_separable = self.weight is not None or apart
        # Any error may occur: a model that cannot be split runs whole.
        except Exception:  # noqa: BLE001
            self.is_separable = False

    def _is_head(
        self, weight: mx.array | QuantizedHead, logits: mx.array, hidden: mx.array
    ) -> bool:
        """Return whether the head, for part of the vocabulary, is a matmul with this weight."""
        if weight.shape != (logits.shape[-1], hidden.shape[-1]):
            return False
        part, large = weight[:_COMPARED_TOKENS], hidden[:1] * _LARGE_SCALE
        return _are_close(logits[:, :_COMPARED_TOKENS], hidden @ part.T) and _are_close(
            self.logits(large)[:, :_COMPARED_TOKENS], large @ part.T
        )

    def _candidates(self) -> Iterator[mx.array | QuantizedHead]:
        for head in find_heads(self._text):
            if "bias" in head:
                continue
            if isinstance(head, nn.Linear | nn.Embedding):
                yield head.weight
            if isinstance(head, DequantizedLinear | DequantizedEmbedding):
                yield QuantizedHead(head)


def find_backbone(text: nn.Module) -> tuple[str, nn.Module | None]:
    """Return the name and the module of a text model's part that contains the layers."""
    for name, part in text.children().items():
        layers = getattr(part, "layers", None) or getattr(part, "h", None)
        if isinstance(part, nn.Module) and layers:
            return name, part
    return "model", text.get("model")


def _stack(backbone: nn.Module) -> nn.Module | None:
    """Return the part of a backbone that contains the layers and a norm, or None."""
    parts = (
        m for m in backbone.modules() if m.get("layers") and isinstance(m.get("norm"), nn.Module)
    )
    return next(parts, None)


def find_heads(text: nn.Module) -> list[nn.Module]:
    """Return the modules of a text model that may be its head, the likeliest first."""
    _, backbone = find_backbone(text)
    names = [(text, "lm_head"), (text, "output")]
    inner = backbone and _stack(backbone)
    for name in ("embed_tokens", "embeddings", "tok_embeddings", "wte"):
        names += [(backbone, name), (inner, name)]
    heads = [getattr(part, name, None) for part, name in names]
    return [head for head in heads if isinstance(head, nn.Module)]


def _are_close(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and _difference(one, other) <= _TOLERANCE


def _difference(one: mx.array, other: mx.array) -> float:
    """Return the largest difference between two arrays, relative to `one`'s largest magnitude."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    largest = mx.maximum(mx.abs(one).max(), 1e-6)
    return float(mx.abs(one - other).max() / largest)
