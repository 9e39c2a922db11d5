"""Finds the shapes that a model's memory use depends on, before the model's weights are read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.jamba import JambaMambaMixer
from mlx_lm.models.mamba import MambaBlock
from mlx_lm.models.rwkv7 import Rwkv7TimeMixing

from mlxtune.backend.device.allocator import graph_limits
from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.forward.head import find_heads
from mlxtune.backend.lora import targets
from mlxtune.backend.lora.model_facts import Matrix, ModelFacts
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.models.mixers.recurrences import BLOCK
from mlxtune.backend.models.stored_layers import QUANTIZED
from mlxtune.backend.workers.shards import ShardedLinear
from mlxtune.config import InstructConfig
from mlxtune.core.steps.graph_memory import GraphMemory
from mlxtune.core.steps.memory_terms import MemoryUse, ModelShapes, lora_bytes

# The number of copies of a layer's scores that the backward pass holds if MLX computes attention on
# the CPU.
_COPIES = 10
# The number of state-sized arrays per token that Mamba's loop keeps, and that RWKV 7's loop holds
# for a block.
_KEPT_STATES, _HELD_STATES = 4, 3
_MAMBA = (MambaBlock, JambaMambaMixer)


@dataclass(frozen=True)
class _StoredMatrix(Matrix):
    """A stored matrix. `rank` is the rank of its LoRA, 0 for none.

    `cast` counts the entries cast for each use; `unpacked` is set if each matmul dequantises the
    matrix. `trained` counts LoRA's parameters for the whole matrix, even if each worker has only a
    part of the matrix.
    """

    rank: int
    cast: int
    unpacked: bool
    trained: int


def model_shapes(base: BaseModel, config: InstructConfig, memory: MemoryUse) -> ModelShapes:
    """Return the shapes of an opened model that runs with the operations that `memory` describes.

    Raises ModelError if LoRA cannot be applied.
    """
    sizes = _matrices(base, config, memory)
    # Our kernels compute on the CPU, without a queue.
    queues = isinstance(memory, GraphMemory) and not on_cpu()
    return ModelShapes(
        itemsize=getattr(mx, base.dtype).size,
        hidden=base.hidden_size,
        layers=len(sizes),
        graphs=graph_limits() if queues else None,
        **_weights(base, config, sizes),
        **_layers(base, sizes),
        **_attention(base, len(sizes)),
        **_head(base, memory),
    )


def _weights(
    base: BaseModel, config: InstructConfig, sizes: Sequence[Sequence[_StoredMatrix]]
) -> dict[str, Any]:
    """Return the fields of `ModelShapes` that describe stored and trained parameters."""
    every = [matrix for layer in sizes for matrix in layer]
    scaled = sum(m.outputs for m in every if m.rank) if config.dora else 0
    trained = sum(m.trained for m in every if m.rank) + scaled
    parameters = [value for _, value in tree_flatten(base.model.parameters())]
    stored = sum(value.nbytes for value in parameters)
    largest = max(parameters, key=lambda value: value.size)
    return {
        # PiSSA keeps and subtracts its initial factors, which are as large as LoRA's.
        "weights": stored + (lora_bytes(trained) if config.is_pissa else 0),
        "stored_itemsize": 0 if base.quantization else largest.itemsize,
        "trainable": trained,
        "scaled": scaled,
        "largest_cast": max(m.cast for m in every),
        "unpacked": max((m.entries for m in every if m.unpacked), default=0),
    }


def _layers(base: BaseModel, sizes: Sequence[Sequence[_StoredMatrix]]) -> dict[str, Any]:
    """Return the fields of `ModelShapes` that describe a layer, besides its attention."""
    layers = list(base.model.layers)
    last = layers[-len(sizes) :]
    # A recurrence keeps outputs and states that are no wider than the convolution before it.
    mixed = [_convolution_channels(layer) for layer in last]
    matmuls = [
        sum(m.width for m in layer) + width for layer, width in zip(sizes, mixed, strict=True)
    ]
    # A layer of experts gathers its inputs, or their gradients, for each expert.
    gathered = [sum(m.gathered for m in layer) for layer in sizes]
    routed = [sum(m.width for m in layer if m.experts > 1) for layer in sizes]
    return {
        "matmuls": sum(matmuls),
        "layer_matmuls": max(map(sum, zip(matmuls, gathered, strict=True))),
        "widest_matmul": max(m.width for layer in sizes for m in layer),
        "updated": max(sum(m.outputs for m in layer if m.rank) for layer in sizes),
        "gathered": sum(gathered),
        "layer_gathered": max(map(sum, zip(gathered, routed, strict=True))),
        "mixed": sum(mixed),
        "layer_mixed": max(mixed),
        "looped": sum(map(_loop_entries, last)),
        "layer_looped": max(map(_looped_block, layers)),
    }


def _head(base: BaseModel, memory: MemoryUse) -> dict[str, Any]:
    """Return the fields of `ModelShapes` that describe the head."""
    return {
        "vocab": base.own_vocab,
        "head_cast": _head_cast(base, getattr(mx, base.dtype), memory),
        "plain_head": base.quantized_compute != QUANTIZED and not _caps(base, attention=False),
    }


def _matrices(
    base: BaseModel, config: InstructConfig, memory: MemoryUse
) -> list[list[_StoredMatrix]]:
    """Return the matrices of each layer, starting at the first layer with LoRA.

    Raises ModelError if LoRA cannot be applied.
    """
    selected = targets.choose_targets(base.model, config)
    ranks = {id(module): targets.rank_of(path, config) for path, module in selected.items()}
    dtype = getattr(mx, base.dtype)
    sizes = [
        [
            _stored_matrix(module, matrices[key], ranks.get(id(module), 0), dtype, memory)
            for key, module in targets.projections(layer).items()
        ]
        for layer, matrices in zip(base.model.layers, ModelFacts(base.model).layers, strict=True)
    ]
    first = next(i for i, layer in enumerate(sizes) if any(m.rank for m in layer))
    return sizes[first:]


def _stored_matrix(
    module: nn.Module, matrix: Matrix, rank: int, dtype: mx.Dtype, memory: MemoryUse
) -> _StoredMatrix:
    quantized, unpacked = "scales" in module, hasattr(module, "unpacked")
    casts, shape = memory.casts_quantized, (matrix.outputs, matrix.inputs)
    narrow = unpacked and casts if quantized else module.weight.dtype != dtype
    whole = module.shard.whole(*shape) if isinstance(module, ShardedLinear) else shape
    return _StoredMatrix(
        **asdict(matrix),
        rank=rank,
        cast=narrow * matrix.entries,
        unpacked=unpacked and not casts,
        trained=rank * matrix.experts * sum(whole),
    )


def _head_cast(base: BaseModel, dtype: mx.Dtype, memory: MemoryUse) -> int:
    text = getattr(base.model, "language_model", base.model)
    head = next(iter(find_heads(text)), None)
    if head is None:
        return 0
    entries = base.own_vocab * base.hidden_size
    if "scales" not in head:
        return entries if head.weight.dtype != dtype else 0
    if not hasattr(head, "unpacked"):
        return 0  # MLX's quantised matmuls take the stored weight.
    return entries * memory.head_copies


def _convolution_channels(layer: nn.Module) -> int:
    """Return the number of channels of a layer's convolutions."""
    return sum(m.weight.shape[0] for m in layer.modules() if isinstance(m, nn.Conv1d))


def _loop_entries(layer: nn.Module) -> int:
    """Return the number of entries that Mamba's loop keeps for a token."""
    mixers = [m for m in layer.modules() if isinstance(m, _MAMBA)]
    return sum(_KEPT_STATES * m.intermediate_size * m.ssm_state_size for m in mixers)


def _looped_block(layer: nn.Module) -> int:
    """Return the number of entries that RWKV 7's loop holds for a block of tokens."""
    mixers = [m for m in layer.modules() if isinstance(m, Rwkv7TimeMixing)]
    return sum(_HELD_STATES * BLOCK * m.hidden_size * m.head_dim for m in mixers)


def _attention(base: BaseModel, layers: int) -> dict[str, Any]:
    """Return the fields of `ModelShapes` that describe attention: its heads and its scores."""
    text = base.text_config
    heads = int(text.get("num_attention_heads") or 1)
    size = text.get("head_dim") or base.hidden_size // heads
    last = list(base.model.layers)[-layers:]
    scored = sum(not any(isinstance(m, nn.Conv1d) for m in layer.modules()) for layer in last)
    added, window = bool(_held_scores(base)), 0
    if _is_fused(base, size) and not added:
        # The fused kernel does not support masks of a sliding window.
        window = text.get("sliding_window") or 1 << 40
    kept, in_layer = (2, 5) if added else (1, 3)
    heads //= base.shards
    return {
        "heads": heads,
        "head_size": size,
        "scores": kept * heads * scored,
        "layer_scores": in_layer * heads,
        "window": int(window),
        "held_scores": _held_scores(base),
    }


def _is_fused(base: BaseModel, head_size: int) -> bool:
    """Return whether the device has a fused kernel for attention and its gradient."""
    if on_cpu() or any("sinks" in module for module in base.model.modules()):
        return False
    if mx.cuda.is_available():
        return getattr(mx, base.dtype).size == 2 and head_size <= 128
    return 64 <= head_size <= 256


def _held_scores(base: BaseModel) -> int:
    """Return how many scores per pair of tokens a layer's backward pass holds on the CPU."""
    heads = int(base.text_config.get("num_attention_heads") or 1)
    # No kernel caps scores, or computes the gradient of the scores that latent attention adds.
    unfused = _caps(base, attention=True) or base.text_config.get("kv_lora_rank")
    return _COPIES * heads if unfused else 0


def _caps(base: BaseModel, *, attention: bool) -> bool:
    """Return whether the scores (with `attention`) or the logits (without) are capped or scaled."""
    text = getattr(base.model, "language_model", base.model)
    # The model's arguments have defaults for options that config.json leaves out.
    options = {**base.text_config, **vars(getattr(text, "args", object))}
    return any(
        bool(value) and ("attn" in name) == attention
        for name, value in options.items()
        if "logit" in name
    )
