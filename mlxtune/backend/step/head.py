"""A model in two halves: the trunk, which gives hidden states, and the head, which gives logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.cpu.packed import Layout, PackedCache, laid_out
from mlxtune.backend.model.layers import DequantizedEmbedding, DequantizedLinear, PackedRows
from mlxtune.backend.step.prefix import PrefixCache
from mlxtune.core.steps.pack import ANY_LENGTH, Segment

# What two ways of computing the same may differ by, of the largest value, in 16 bits.
_TOLERANCE = 2e-2
# And in float32.
_TOLERANCE_FLOAT32 = 1e-4
# Hidden states so much larger show any soft-capping of the logits.
_LARGE = 1000.0
# Rows of the vocabulary that are compared.
_PART = 1024
# What is run to find out how a model may be run: texts, two of which begin with the same tokens,
# and these in one line; `_PLACES` are where its tokens stand in the texts.
_TEXTS = [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 0]]
_LINE = Layout(
    [Segment(*each) for each in [(0, 2, 0, -1), (2, 4, 2, 0), (4, 6, 2, 0), (6, 10, 0, -1)]]
)
_LINE_TOKENS, _PLACES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0], [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]


class _TrunkDone(Exception):
    """Ends a call of the model where its head would begin."""


class _Passage(nn.Module):
    """Stands in the trunk's place for one call: keeps what that gives, or gives what it is told.

    With `alone`, the call ends there, by _TrunkDone. The trunk is no child of it, so that the
    model's parameters stay those that they are.
    """

    def __init__(
        self, trunk: nn.Module, given: mx.array | None = None, *, alone: bool = False
    ) -> None:
        super().__init__()
        object.__setattr__(self, "_trunk", trunk)
        object.__setattr__(self, "_alone", alone)
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "hidden", None)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.given is not None:
            return self.given
        object.__setattr__(self, "hidden", self._trunk(*args, **options))
        if self._alone:
            raise _TrunkDone
        return self.hidden

    def __getattr__(self, name: str) -> Any:
        # Tied heads take the embeddings from the trunk.
        return getattr(object.__getattribute__(self, "_trunk"), name)


class SplitModel:
    """An mlx-lm model whose head can run on chosen positions alone, soft-capping and all.

    `splits` tells whether its trunk was found; without it, only the whole can be run. `weight` is
    that of a head (V, H) which is one product and no more, None for any other head; `dtype` is that
    of the hidden states.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._text = getattr(model, "language_model", model)
        self._trunk = getattr(self._text, "model", None)
        self.weight: mx.array | PackedRows | None = None
        self.splits = False
        self.dtype: mx.Dtype | None = None
        # The hidden states of a few texts, each by itself.
        self._alone = mx.array(0.0)
        if isinstance(self._trunk, nn.Module):
            self._compare()

    def hidden(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Return the trunk's output (B, T, H) for inputs int32 (B, T).

        `cache` has a PrefixCache or a PackedCache for each layer.
        """
        passage = _Passage(self._trunk, alone=True)
        with suppress(_TrunkDone):
            self._call(passage, inputs, cache)
        return passage.hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits (P, V) of hidden states (P, H)."""
        passage = _Passage(self._trunk, hidden[None])
        return self._call(passage, mx.zeros((1, hidden.shape[0]), dtype=mx.int32))[0]

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, each of which takes one cache."""
        return list(self.model.layers)

    def shares_prefixes(self) -> bool:
        """Tell whether running a prefix apart gives what running the whole gives."""
        inputs = mx.array([[1, 2, 3, 4, 5]])
        try:
            whole = self.hidden(inputs)
            recorders = [PrefixCache() for _ in self.layers]
            self.hidden(inputs[:, :2], recorders)
            rest = self.hidden(inputs[:, 2:], [PrefixCache(r.recorded) for r in recorders])
            return _close(whole[:, 2:], rest)
        # Of whatever kind: an architecture with other caches does not share.
        except Exception:  # noqa: BLE001
            return False

    def packs(self) -> int:
        """Return up to what length examples may stand in one line: 0 where they may not at all.

        Tells by running some that way, in the CPU's own functions, and each by itself.
        """
        caches = [PackedCache() for _ in self.layers]
        try:
            with laid_out(_LINE):
                packed = self.hidden(mx.array([_LINE_TOKENS]), caches)[0]
            alone = self._alone.reshape(-1, packed.shape[-1])[mx.array(_PLACES)]
            if not _close(alone, packed, _TOLERANCE_FLOAT32):
                return 0
        # Of whatever kind: an architecture with other caches or masks does not pack.
        except Exception:  # noqa: BLE001
            return 0
        return min((cache.window for cache in caches if cache.window), default=ANY_LENGTH)

    def _call(
        self, passage: _Passage, inputs: mx.array, cache: Sequence[Any] | None = None
    ) -> mx.array:
        # Set as an entry, which keeps the order of the parameters.
        self._text["model"] = passage
        try:
            return self._text(inputs, cache=cache) if cache else self._text(inputs)
        finally:
            self._text["model"] = self._trunk

    def _compare(self) -> None:
        """Find out on a few tokens whether the head after the trunk is the model, and how."""
        try:
            passage = _Passage(self._trunk)
            logits = self._call(passage, mx.array(_TEXTS))[0]
            self._alone, hidden = passage.hidden, passage.hidden[0]
            self.dtype = hidden.dtype
            self.weight = next(
                (w for w in self._candidates() if self._is_head(w, logits, hidden)), None
            )
            self.splits = self.weight is not None or _close(logits, self.logits(hidden))
        # Of whatever kind: what cannot be split is run whole.
        except Exception:  # noqa: BLE001
            self.splits = False

    def _is_head(self, weight: mx.array | PackedRows, logits: mx.array, hidden: mx.array) -> bool:
        """Tell whether the head is the product with a weight, by a part of the vocabulary."""
        if weight.shape != (logits.shape[-1], hidden.shape[-1]):
            return False
        part, large = weight[:_PART], hidden[:1] * _LARGE
        return _close(logits[:, :_PART], hidden @ part.T) and _close(
            self.logits(large)[:, :_PART], large @ part.T
        )

    def _candidates(self) -> Iterator[mx.array | PackedRows]:
        heads = (getattr(self._text, "lm_head", None), getattr(self._trunk, "embed_tokens", None))
        for head in heads:
            if not isinstance(head, nn.Module) or "bias" in head:
                continue
            if isinstance(head, nn.Linear | nn.Embedding):
                yield head.weight
            if isinstance(head, DequantizedLinear | DequantizedEmbedding):
                yield PackedRows(head)


def _close(one: mx.array, other: mx.array, tolerance: float = _TOLERANCE) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    largest = mx.maximum(mx.abs(one).max(), 1e-6)
    return bool(mx.abs(one - other).max() <= tolerance * largest)
