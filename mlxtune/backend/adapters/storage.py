"""Storage of a fused model's trained projections: as in the base, in more bits, or plain.

Quantised weights are rounded to nearest, or by GPTQ, which `gptq` computes.

All other weights keep the base's storage. A layer whose format differs from the model's has an
entry under its path in the config's `quantization`, as in the mixed plans of `mlx_lm.convert`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxtune.errors import ConfigError

# The numbers of bits that are tried after the base's own.
_MORE_BITS = (6, 8)
_QUANTIZED_LAYERS = (nn.QuantizedLinear, QuantizedSwitchLinear)
# The smallest group size of the affine format; formats of 4-bit floats have smaller groups.
_MIN_GROUP_SIZE = 32


@dataclass(frozen=True)
class Storage:
    """A storage format: its name, and the bits of a weight, which are None for plain weights.

    A projection with at least as many bits keeps its own format. `rounded` has the parameters of
    projections that GPTQ has rounded, by name; the others are rounded to nearest.
    """

    name: str
    bits: int | None
    gptq: bool = False
    rounded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)

    @property
    def method(self) -> str | None:
        """How weights are rounded; None for plain weights."""
        return None if self.bits is None else "gptq" if self.gptq else "nearest"


AS_BASE, PLAIN = Storage("as the base", 0), Storage("plain", None)


def quantized_among(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the quantised projections among some modules."""
    return [module for module in modules if isinstance(module, _QUANTIZED_LAYERS)]


def storages_for(modules: Iterable[nn.Module], bits: int | None = None) -> list[Storage]:
    """Return the storage formats to try for trained projections, the smallest first.

    With `bits`, these are the formats of this size. Raises ConfigError if the base has more bits.
    """
    if not (quantized := quantized_among(modules)):
        if bits is not None:
            raise ConfigError(["--bits is for trained layers that are quantised: leave it out"])
        return [AS_BASE]
    fewest_bits = min(module.bits for module in quantized)
    if bits is not None and bits < fewest_bits:
        raise ConfigError([f"--bits must be at least the base's {fewest_bits}, not {bits}"])
    least = bits or fewest_bits
    name = AS_BASE.name if least == fewest_bits else f"in {least} bits"
    formats = [Storage(name, least)]
    if any(format_of(module, least)["mode"] == "affine" for module in quantized):
        formats.append(Storage(f"{name}, by GPTQ", least, gptq=True))
    if bits is None:
        formats += [*(Storage(f"in {n} bits", n) for n in _MORE_BITS if n > fewest_bits), PLAIN]
    return formats


def layer_like(module: nn.Module, weight: mx.array, storage: Storage = AS_BASE) -> nn.Module:
    """Return a copy of a layer with this weight in the given storage.

    A plain layer stays plain; a layer with at least as many bits as the storage keeps its format.
    """
    layer: Any
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        layer = nn.Embedding(*weight.shape)
    elif weight.ndim == 3:
        count, rows, columns = weight.shape
        layer = SwitchLinear(columns, rows, count, bias=False)
    else:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = weight
    if "bias" in module:
        layer.bias = module.bias
    if isinstance(module, _QUANTIZED_LAYERS) and storage.bits is not None:
        return layer.to_quantized(**format_of(module, storage.bits))
    return layer


def format_of(module: nn.Module, bits: int = 0) -> dict[str, Any]:
    """Return the format of a quantised projection that gets this many bits, unless it has them."""
    if bits <= module.bits:
        return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    group = max(module.group_size, _MIN_GROUP_SIZE)
    return {"group_size": group, "bits": bits, "mode": "affine"}


def add_to_config(
    config: dict[str, Any], layers: Iterable[tuple[str, nn.Module, nn.Module]]
) -> None:
    """Record the layers whose format differs from the base's in a quantised model's config.

    Each layer is given as its path, the base's module and the module that replaces it.
    """
    exceptions: dict[str, Any] = {}
    for path, module, layer in layers:
        if isinstance(module, _QUANTIZED_LAYERS):
            new = format_of(layer) if isinstance(layer, _QUANTIZED_LAYERS) else False
            if new != format_of(module):
                exceptions[path] = new
    for key in ("quantization", "quantization_config"):
        if isinstance(config.get(key), dict):
            config[key] = config[key] | exceptions
