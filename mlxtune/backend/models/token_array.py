"""Token ids as arrays for a model, compared with the rows of its embedding.

MLX checks no index: an id beyond the embedding reads foreign memory, or crashes the process.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.errors import ModelError

# The names of input embeddings in mlx-lm's models, the likeliest first.
EMBEDDINGS = (
    *("embed_tokens", "tok_embeddings", "wte", "word_embeddings", "embeddings", "embedding"),
    *("embed_in", "embed"),
)


class TokenArrays:
    """Makes arrays of token ids for one model, whose embedding has `rows` rows."""

    def __init__(self, model: nn.Module) -> None:
        self.rows = _rows(model)

    def array(self, tokens: npt.ArrayLike) -> mx.array:
        """Return token ids as an array. Raises ModelError as `check` does."""
        return mx.array(self.check(tokens).astype(np.int32, copy=False))

    def check(self, tokens: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
        """Return token ids. Raises ModelError if the embedding has no row for an id."""
        ids = np.asarray(tokens)
        if self.rows and ids.size and not 0 <= ids.min() <= ids.max() < self.rows:
            odd = ids.max() if ids.max() >= self.rows else ids.min()
            raise ModelError(
                f"the tokenizer gives token {odd:,}, but the model's embedding has {self.rows:,} "
                "rows: use the model's own tokenizer files"
            )
        return ids


def _rows(model: nn.Module) -> int:
    """Return the number of rows of a model's embedding; 0 if no embedding is found."""
    # Of several modules with one name, the outermost counts.
    embeddings = {
        path.rpartition(".")[2]: module
        for path, module in sorted(model.named_modules(), key=lambda each: -each[0].count("."))
        if isinstance(module.get("weight"), mx.array)
    }
    module = next((embeddings[name] for name in EMBEDDINGS if name in embeddings), None)
    if module is None:
        return max(
            (each.weight.shape[0] for each in embeddings.values() if _is_embedding(each)), default=0
        )
    shard = getattr(module, "vocabulary", None)
    return int(module.weight.shape[0] if shard is None else shard.size * shard.group.size())


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
