"""Shards a model over workers: each has a part of the vocabulary and of every large projection.

Tensor parallelism, as in Megatron-LM, arXiv:1909.08053, section 3: the first of two successive
projections is sharded by outputs, the second by inputs, and a sum over the workers follows.
mlx-lm's `shard` decides how an architecture is sharded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
    sum_gradients,
)
from mlx.utils import tree_unflatten

from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.models.stored_layers import dimensions
from mlxtune.core.formatting import pluralize
from mlxtune.errors import ModelError, one_line

# Architectures for which tests found the sharded model's gradients equal to one worker's. mlx-lm
# shards some other architectures, for inference only.
ARCHITECTURES = (
    *("glm4_moe", "gpt_oss", "llama", "ministral3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe"),
    "qwen3_moe",
)
# Modules with a row for each token of the vocabulary.
_ROWS = ("embed_tokens", "lm_head")
# Config keys whose values must be divisible by the number of workers.
_DIVISIBLE_KEYS = (
    *("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_OUTPUT_SHARDED_KINDS = (AllToShardedLinear, QuantizedAllToShardedLinear)
_INPUT_SHARDED_KINDS = (ShardedToAllLinear, QuantizedShardedToAllLinear)


class PlaceholderGroup:
    """A placeholder for a group of workers while planning, when nothing is computed."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        """Return the number of the worker for which to plan."""
        return 0

    def size(self) -> int:
        """Return the number of workers."""
        return self._size


class ColumnParallelInput:
    """Passes inputs, the same on all workers, to projections that are sharded by outputs.

    Sums the inputs' gradients over the workers, once for successive projections of the same input.
    """

    def __init__(self, group: Any) -> None:
        self._sum = sum_gradients(group)
        self._last: tuple[Any, Any] = None, None

    def __call__(self, x: mx.array) -> mx.array:
        if self._last[0] is not x:
            self._last = x, self._sum(x)
        return self._last[1]


@dataclass(frozen=True, eq=False)
class Shard:
    """A worker's part of a projection: the slice `own` of its outputs or its inputs."""

    group: Any
    entrance: ColumnParallelInput
    by_outputs: bool
    own: slice

    def enter(self, x: mx.array) -> mx.array:
        """Return inputs x; their gradient is summed over the workers if sharded by outputs."""
        return self.entrance(x) if self.by_outputs else x

    def leave(self, y: mx.array) -> mx.array:
        """Return outputs y if sharded by outputs, else their sum over the workers."""
        return y if self.by_outputs else _sum(y, self.group)

    def factors(self, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        """Return this worker's parts of the whole projection's factors A (in, k) and B (k, out)."""
        return (a, b[:, self.own]) if self.by_outputs else (a[self.own], b)

    def inputs(self, x: mx.array) -> mx.array:
        """Return the part of inputs x (..., in) that this worker multiplies."""
        return x if self.by_outputs else x[..., self.own]

    def whole(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the whole matrix's dimensions, given this part's."""
        workers = self.group.size()
        return (outputs * workers, inputs) if self.by_outputs else (outputs, inputs * workers)


class ShardedLinear(nn.Module):
    """A worker's part of a linear layer; its class also inherits from the layer's class."""

    shard: Shard

    def __init__(self, linear: nn.Module, arrays: Mapping[str, mx.array], part: Shard) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(linear))
        dict.update(self, {**linear, **arrays})
        self.shard = part

    def __call__(self, x: mx.array) -> mx.array:
        return self.shard.leave(self.own_matmul(self.shard.enter(x)))

    def own_matmul(self, x: mx.array) -> mx.array:
        """Return this worker's part of the outputs, or its term of their sum over the workers."""
        return super().__call__(x)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A worker's rows of embeddings and head, for the `size` tokens from `start` on."""

    group: Any
    start: int
    size: int

    def find(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Return each token's row on this worker (0 without one), and whether the row exists."""
        indices = tokens - self.start
        here = (indices >= 0) & (indices < self.size)
        return mx.where(here, indices, 0), here

    def enter(self, hidden: mx.array) -> mx.array:
        """Return hidden states unchanged; their gradient is summed over the workers."""
        return sum_gradients(self.group)(hidden)

    def sum(self, x: mx.array) -> mx.array:
        """Return the sum of an array over the workers."""
        return _sum(x, self.group)

    def highest(self, x: mx.array) -> mx.array:
        """Return the maximum of each entry over the workers."""
        if isinstance(self.group, PlaceholderGroup):
            return x
        return mx.distributed.all_max(x, group=self.group)


class VocabularyShard(nn.Module):
    """A worker's rows of a head or of embeddings, in a `_combined_class` with the layer's."""

    vocabulary: Vocabulary

    def __init__(self, module: nn.Module, vocabulary: Vocabulary) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(module))
        end = vocabulary.start + vocabulary.size
        own = {name: value[vocabulary.start : end] for name, value in module.items()}
        dict.update(self, {name: mx.contiguous(value) for name, value in own.items()})
        self.vocabulary = vocabulary


class ShardedEmbedding(VocabularyShard):
    """A worker's rows of embeddings; a lookup sums the results of all workers."""

    def __call__(self, tokens: mx.array) -> mx.array:
        indices, here = self.vocabulary.find(tokens)
        rows = super().__call__(indices)
        return self.vocabulary.sum(mx.where(here[..., None], rows, mx.array(0, rows.dtype)))


_classes: dict[tuple[type, type], Any] = {}


def _combined_class(part: type, whole: type) -> Any:
    """Return the cached class that inherits from `part` and `whole`."""
    if (part, whole) not in _classes:
        name = f"{part.__name__}{whole.__name__}"
        _classes[part, whole] = type(name, (part, whole), {})
    return _classes[part, whole]


def shard_base(base: BaseModel, group: Any) -> BaseModel:
    """Return this worker's part of an opened base; no weights are read.

    Raises ModelError if the base cannot be sharded over the group.
    """
    workers, model = group.size(), base.model
    _check(base, workers)
    before = dict(model.named_modules())
    shapes = {path: module.weight.shape for path, module in before.items() if "weight" in module}
    try:
        model.shard(group)
    except (ValueError, AssertionError) as error:
        raise _refuse(
            f"{base.folder} over {pluralize(workers, 'worker')}: {one_line(error)}"
        ) from error
    layers: dict[str, nn.Module] = {}
    entrance = ColumnParallelInput(group)
    for path, module in model.named_modules():
        if isinstance(module, (*_OUTPUT_SHARDED_KINDS, *_INPUT_SHARDED_KINDS)):
            layers[path] = _shard_linear(before[path], module, group, entrance)
        elif path in shapes and module.weight.shape != shapes[path]:
            module.sharded_in_place = True
    rows = {path: module for path, module in before.items() if path.endswith(_ROWS)}
    if even := base.vocab_size % workers == 0:
        size = base.vocab_size // workers
        vocabulary = Vocabulary(group, group.rank() * size, size)
        for path, module in rows.items():
            part = VocabularyShard if path.endswith("lm_head") else ShardedEmbedding
            layers[path] = _combined_class(part, type(module))(module, vocabulary)
        # Stops mlx-lm from gathering all logits, as it does if it has sharded the head.
        getattr(model, "language_model", model).sharding_group = None
    model.update_modules(tree_unflatten(list(layers.items())))
    return replace(base, shards=workers, own_vocab=base.vocab_size // (workers if even else 1))


def shards_of(module: nn.Module) -> int:
    """Return the number of workers over which a module is sharded."""
    return int(module.shard.group.size()) if isinstance(module, ShardedLinear) else 1


def _shard_linear(
    linear: nn.Module, sharded: nn.Module, group: Any, entrance: ColumnParallelInput
) -> nn.Module:
    by_outputs = isinstance(sharded, _OUTPUT_SHARDED_KINDS)
    inputs, outputs = dimensions(sharded)
    size = outputs if by_outputs else inputs
    start = group.rank() * size
    arrays = {name: value for name, value in sharded.items() if isinstance(value, mx.array)}
    if not by_outputs and group.rank() and "bias" in arrays:
        # Worker 0 alone adds the bias.
        arrays["bias"] = mx.zeros_like(arrays["bias"])
    part = Shard(group, entrance, by_outputs, slice(start, start + size))
    return _combined_class(ShardedLinear, type(linear))(linear, arrays, part)


def _check(base: BaseModel, workers: int) -> None:
    """Raise ModelError if the model's architecture or sizes do not allow sharding."""
    if base.model_type not in ARCHITECTURES:
        raise _refuse(
            f"models of type {base.model_type}, only {', '.join(ARCHITECTURES)}: "
            "leave out --parallel, so that each worker has the whole model"
        )
    config = base.text_config
    for name in _DIVISIBLE_KEYS:
        size = config.get(name)
        if isinstance(size, int) and size % workers:
            raise _refuse(
                f"{base.folder} over {pluralize(workers, 'worker')}: its {name} is {size}: "
                "start a number of workers that divides it"
            )


def _refuse(what: str) -> ModelError:
    return ModelError(f"--parallel tensor cannot shard {what}")


def _sum(x: mx.array, group: Any) -> mx.array:
    return 2 * x if isinstance(group, PlaceholderGroup) else mx.distributed.all_sum(x, group=group)
