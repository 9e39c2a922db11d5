"""Problems in the headers of a model's weights that would make MLX or mlx-lm fail or crash."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlxtune.backend.models.model_config import FORMATS
from mlxtune.backend.models.quantize import is_quantized
from mlxtune.core.files.tensor_files import TensorInfo

# Parts of the names of image and sound encoders in multimodal models.
NOT_TEXT = re.compile(r"vision|visual|audio|speech|image|multi_modal")
_FLOATS = ("F16", "BF16", "F32")
# mlx-lm loads tensors with these names, but drops causal masks, whose names these exclude.
_LOADED = re.compile(r"(?!.*(?:attn|attention)\.bias$).*\.(?:weight|scales|biases|bias)")
# Dtypes of weights that mlx-lm converts with a separate scale, and endings of the scale's name.
_SCALED = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale")


def weight_problems(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of the language model's tensors, with the tensors' names."""
    quantised = is_quantized(config)
    for name, info in tensors.items():
        if NOT_TEXT.search(name) or not _LOADED.fullmatch(name):
            continue
        stem, _, kind = name.rpartition(".")
        known = (*_FLOATS, "U8") if kind == "scales" else (*_FLOATS, "U32", "U8")
        scaled = info.dtype in _SCALED and any(stem + each in tensors for each in _SCALES)
        if info.dtype not in known and not scaled:
            yield f"{name:.100} is {info.dtype}, not one of {', '.join(known)}"
        elif quantised and kind == "scales" and f"{stem}.weight" in tensors:
            yield from _scales_problems(stem, tensors)


def _scales_problems(stem: str, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield errors in a quantised matrix that can make MLX divide by zero or read out of bounds."""
    weight, scales = tensors[f"{stem}.weight"], tensors[f"{stem}.scales"]
    biases = tensors.get(f"{stem}.biases")
    name = f"{stem:.100}.scales"
    if weight.dtype != "U32":
        yield f"{stem:.100}.weight is {weight.dtype}, but has scales, so U32 is expected"
    elif len(scales.shape) < 2 or scales.shape[:-1] != weight.shape[:-1]:
        yield f"{name} has shape {scales.shape}, which does not fit the weight's {weight.shape}"
    elif (
        weight.shape[-1] * 32
        not in {
            scales.shape[-1] * bits * size
            for bits in FORMATS["bits"]
            for size in FORMATS["group_size"]
        }
        or not scales.shape[-1]
    ):
        yield f"{name} has shape {scales.shape}: no group size fits the weight's {weight.shape}"
    elif biases is not None and biases.shape != scales.shape:
        yield f"{stem:.100}.biases has shape {biases.shape}, but the scales have {scales.shape}"
