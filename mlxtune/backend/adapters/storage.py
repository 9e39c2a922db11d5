"""Storage of a fused model's trained projections: as in the base, in more bits, or plain.

All other weights keep the base's storage. A layer whose format differs from the model's has an
entry under its path in the config's `quantization`, as in the mixed plans of `mlx_lm.convert`.
"""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

AS_BASE, PLAIN = "as the base", "plain"
# The number of bits of each storage format that uses MLX's affine quantisation.
_BITS = {"in 6 bits": 6, "in 8 bits": 8}
_QUANTIZED = (nn.QuantizedLinear, QuantizedSwitchLinear)
# The smallest group size of the affine format; formats of 4-bit floats have smaller groups.
_SMALLEST_GROUP = 32


def quantized_among(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the quantised projections among some modules."""
    return [module for module in modules if isinstance(module, _QUANTIZED)]


def storages_for(modules: Iterable[nn.Module]) -> list[str]:
    """Return the storage formats to try for trained projections, the smallest first."""
    if not (quantized := quantized_among(modules)):
        return [AS_BASE]
    fewest = min(module.bits for module in quantized)
    return [AS_BASE, *(name for name, bits in _BITS.items() if bits > fewest), PLAIN]


def layer_like(module: nn.Module, weight: mx.array, storage: str = AS_BASE) -> nn.Module:
    """Return a copy of a layer with this weight in the given storage.

    A plain layer stays plain; a layer with at least as many bits as the storage keeps its format.
    """
    made: Any
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        made = nn.Embedding(*weight.shape)
    elif weight.ndim == 3:
        count, rows, columns = weight.shape
        made = SwitchLinear(columns, rows, count, bias=False)
    else:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = weight
    if "bias" in module:
        made.bias = module.bias
    if isinstance(module, _QUANTIZED) and storage != PLAIN:
        return made.to_quantized(**_format(module, storage))
    return made


def _format(module: nn.Module, storage: str) -> dict[str, Any]:
    bits = _BITS.get(storage, 0)
    if bits <= module.bits:
        return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    group = max(module.group_size, _SMALLEST_GROUP)
    return {"group_size": group, "bits": bits, "mode": "affine"}


def add_to_config(
    config: dict[str, Any], layers: Iterable[tuple[str, nn.Module, nn.Module]], storage: str
) -> None:
    """Unless the storage is the base's, record each layer's format in a quantised model's config.

    Each layer is given as its path, the base's module and the module that replaces it.
    """
    if storage == AS_BASE:
        return
    exceptions: dict[str, Any] = {}
    for path, module, made in layers:
        if isinstance(made, _QUANTIZED):
            exceptions[path] = _format(made, AS_BASE)
        elif isinstance(module, _QUANTIZED):
            exceptions[path] = False
    for key in ("quantization", "quantization_config"):
        if isinstance(config.get(key), dict):
            config[key] = config[key] | exceptions
