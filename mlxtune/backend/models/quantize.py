"""Quantises a model as its weights are read, so that memory never holds all original weights."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce, tree_unflatten
from mlx_lm.convert import MODEL_CONVERSION_DTYPES
from mlx_lm.models.switch_layers import SwitchLinear

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.models.nf4 import BLOCK, NF4Linear, in_parts
from mlxtune.backend.models.stored_layers import cast_parameters
from mlxtune.errors import ModelError

# The parameters of MLX's formats, by the name in --quantize; the values are mlx-lm's defaults.
MLX_FORMATS: dict[str, dict[str, Any]] = {
    "4": {"group_size": 64, "bits": 4, "mode": "affine"},
    "8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
NF4 = "nf4"
FORMATS = (*MLX_FORMATS, NF4)
# The number of entries to quantise at a time on the CPU, where MLX runs some operations ahead.
_BLOCK_ENTRIES = 1 << 16

Predicate = Callable[[str, nn.Module], Any]


def quantize_lazily(
    model: nn.Module, config: Mapping[str, Any], quantize: str, double_quant: bool = False
) -> str:
    """Quantise a model whose weights have not been read yet; return a description of the format.

    In MLX's formats, the result equals that of `mlx_lm.convert`: embeddings and head are quantised
    too, the architecture's own predicate is respected, and matrices whose rows are not divisible
    into groups stay unquantised. In nf4, as in QLoRA, only linear layers are quantised, except the
    head.

    Raises ModelError for a model that cannot be quantised.
    """
    if quantize not in FORMATS:
        raise ModelError(f"--quantize: must be one of {', '.join(FORMATS)}, not {quantize!r:.40}")
    predicate = getattr(model, "quant_predicate", None)
    if quantize == NF4:
        _to_nf4(model, predicate, double_quant)
        scales = ", scales in 8 bits" if double_quant else ""
        return f"4-bit nf4, group {BLOCK}{scales}"
    parameters = MLX_FORMATS[quantize]
    group = parameters["group_size"]
    convert_dtype(model, config)

    def parameters_for(path: str, module: nn.Module) -> Any:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0
        return fits and (predicate is None or predicate(path, module))

    weights = {path: module.weight for path, module in model.named_modules() if "weight" in module}
    nn.quantize(model, **parameters, class_predicate=parameters_for)
    for path, module in model.named_modules():
        if "scales" in module:
            _quantize_in_parts(module, weights[path])
    return describe_format(parameters)


def convert_dtype(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Cast a model's weights as `mlx_lm.convert` does before it quantises them."""
    text = config.get("text_config")
    named = config.get("torch_dtype")
    if named is None and isinstance(text, Mapping):
        named = text.get("dtype")
    if named in MODEL_CONVERSION_DTYPES:
        cast_parameters(model, getattr(mx, str(named)))


def describe_format(parameters: Mapping[str, Any]) -> str:
    """Describe one of MLX's formats, given its parameters from a config."""
    mode = parameters.get("mode", "affine")
    return f"{parameters.get('bits')}-bit {mode}, group {parameters.get('group_size')}"


def quantized_config(model: nn.Module, quantize: str) -> dict[str, Any]:
    """Return the entries that `mlx_lm.convert` adds to a config for one of MLX's formats."""
    parameters = MLX_FORMATS[quantize]
    # Layers for which the architecture chooses other parameters are listed by path.
    exceptions = {
        path: {name: getattr(module, name) for name in parameters}
        for path, module in model.named_modules()
        if "scales" in module and any(getattr(module, n) != v for n, v in parameters.items())
    }
    quantization = parameters | exceptions
    return {"quantization": quantization, "quantization_config": quantization}


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether a model's config says that the weights are quantised."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    return any(part.get("quantization") or part.get("quantization_config") for part in parts)


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantised config's group_size, bits and mode, which is affine by default."""
    saved = config.get("quantization") or config.get("quantization_config")
    if not isinstance(saved, Mapping):
        return {}
    named = {name: saved[name] for name in ("group_size", "bits", "mode") if name in saved}
    return {"mode": "affine", **named}


def read_one_by_one(model: nn.Module) -> None:
    """Read and quantise a model's weights one module at a time, the largest first.

    A module's original weights are freed before the next module is read, so memory holds
    only one module's originals in addition to the quantised weights.
    """
    parts = [module for _, module in model.named_modules() if not module.children()]

    def size(module: nn.Module) -> int:
        return tree_reduce(lambda total, value: total + value.nbytes, module.parameters(), 0)

    for module in sorted(parts, key=size, reverse=True):
        mx.eval(module.parameters())
        mx.clear_cache()
    mx.eval(model.parameters())


def _quantize_in_parts(module: nn.Module, weight: mx.array) -> None:
    """On the CPU, quantise a module to floats a few rows at a time, without changing the result.

    Otherwise, MLX's temporary arrays would take up to 80 bytes per entry for 4-bit floats.
    """
    if module.mode == "affine" or not on_cpu():
        return

    def quantize(rows: mx.array) -> tuple[mx.array, ...]:
        return mx.quantize(rows, module.group_size, module.bits, mode=module.mode)

    arrays = in_parts(weight.reshape(-1, weight.shape[-1]), _BLOCK_ENTRIES, quantize)
    module.weight, module.scales = (array.reshape(*weight.shape[:-1], -1) for array in arrays)


def _to_nf4(model: nn.Module, predicate: Predicate | None, double_quant: bool) -> None:
    inside = {id(module) for layer in model.layers for module in layer.modules()}

    layers = []
    for path, module in model.named_modules():
        if isinstance(module, SwitchLinear):
            raise ModelError(
                f"--quantize nf4 does not support experts ({path}): use --quantize mxfp4"
            )
        fits = type(module) is nn.Linear and not module.weight.shape[1] % BLOCK
        # Layers for which an architecture requests more bits are not quantised.
        if fits and id(module) in inside and (predicate is None or predicate(path, module) is True):
            layers.append((path, NF4Linear(module, double_quant=double_quant)))
    model.update_modules(tree_unflatten(layers))
    if not layers:
        raise ModelError(
            f"--quantize nf4: this model has no linear layer whose width is a multiple of {BLOCK}: "
            "use --quantize 4"
        )
