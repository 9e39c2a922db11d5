"""Loads the base model with mlx-lm in the compute dtype, and describes it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import get_total_parameters, load_model

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.models.model_config import misfit
from mlxtune.backend.models.model_folder import (
    ENCODER_NAME,
    check_weights,
    read_config,
    weight_names,
    why_incomplete,
    without_wildcards,
)
from mlxtune.backend.models.nf4 import NF4Linear
from mlxtune.backend.models.quantize import (
    MLX_FORMATS,
    convert_dtype,
    describe_format,
    is_quantized,
    quantize_lazily,
    read_one_by_one,
)
from mlxtune.backend.models.stored_layers import (
    DEQUANTIZED,
    QUANTIZED,
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
    TimedMatmuls,
    cast_parameters,
    compute_quantized,
    replace_modules,
    time_matmuls,
)
from mlxtune.config.data_config import AS_STORED, BaseOptions
from mlxtune.core.files.hashing import base_fingerprint
from mlxtune.core.formatting import pluralize, short_number
from mlxtune.errors import ModelError, one_line

# The ways to compute a matmul with quantised weights.
QUANTIZED_COMPUTE_FORMS = (QUANTIZED, DEQUANTIZED)


@dataclass(frozen=True)
class BaseModel:
    """A model that computes in `dtype`, and its facts.

    `text_config` is the language model's part of config.json. `quantization` describes quantised
    weights, `quantize` is the format they were quantised to while loading, and `quantized_compute`
    how they are multiplied; each is None if it does not apply. `passed_over` counts the tensors for
    images and sound, which mlx-lm does not load. `shards` is the number of workers that share the
    model; each computes the logits of `own_vocab` tokens.
    """

    model: nn.Module
    folder: Path
    model_type: str
    num_layers: int
    parameters: int
    dtype: str
    quantization: str | None
    vocab_size: int
    hidden_size: int
    text_config: Mapping[str, Any]
    quantize: str | None = None
    double_quant: bool = False
    quantized_compute: str | None = None
    passed_over: int = 0
    shards: int = 1
    own_vocab: int = 0

    def describe(self) -> str:
        """Return a one-line description of the model."""
        quantization = ""
        if self.quantization:
            when = " while loading" if self.quantize else ""
            quantization = f"quantised{when} ({self.quantization}), "
        others = (
            "; only its language part is used: "
            f"{pluralize(self.passed_over, 'tensor')} for images or sound passed over"
        )
        unpacked = ", matrices dequantised for each use"
        return (
            f"{self.model_type}, {self.num_layers} layers, {short_number(self.parameters)} "
            f"parameters{f' over {self.shards} workers' if self.shards > 1 else ''}, "
            f"{quantization}computing in {self.dtype}"
            f"{unpacked if self.quantized_compute == DEQUANTIZED else ''}"
            f"{others if self.passed_over else ''}"
        )


def load_base(folder: Path, dtype: str, options: BaseOptions = AS_STORED) -> BaseModel:
    """Open a model as `open_base` does, and read its weights.

    Raises ModelError if the folder is incomplete or broken, or if the model cannot be quantised.
    """
    base = open_base(folder, dtype, options)
    read_weights(base)
    return base


def open_base(folder: Path, dtype: str, options: BaseOptions = AS_STORED) -> BaseModel:
    """Return a model in the given dtype (`auto`: on a GPU, the dtype of the weights; on the CPU,
    float32).

    Its shapes and dtypes are known, but no weights are read. Quantised weights stay quantised; the
    other weights and the activations have the given dtype. For `quantized_compute`, see
    `compute_quantized`.

    Raises ModelError if the folder is incomplete or broken, or if the model cannot be quantised.
    """
    config = read_config(folder, trust_remote_code=options.trust_remote_code)
    if options.quantize is not None and is_quantized(config):
        raise ModelError(
            f"{folder} is already quantised: leave out --quantize {options.quantize}, "
            "or name the full-precision model"
        )
    model, config = load_lazily(folder, config)
    return as_base_model(model, config, folder, dtype, options)


def as_base_model(
    model: nn.Module,
    config: Mapping[str, Any],
    folder: Path,
    dtype: str,
    options: BaseOptions = AS_STORED,
) -> BaseModel:
    """Prepare, as `open_base` does, an mlx-lm model whose weights have not been read yet.

    Raises ModelError if the model is broken or cannot be quantised.
    """
    quantize = options.quantize
    try:
        if quantize in MLX_FORMATS:
            # Before the dtype is chosen: `auto` means the dtype of the weights to quantise.
            convert_dtype(model, config)
        compute_dtype = _choose_dtype(model, dtype)
        stored = config.get("quantization")
        quantization = describe_format(stored) if stored else None
        if quantize is not None:
            quantization = quantize_lazily(model, config, quantize, options.double_quant)
        _cast(model, compute_dtype)
        compute = compute_quantized(model, compute_dtype, options.quantized_compute)
        text_config = _text_config(config)
        # This builds a graph without computing it, to expose config values of the wrong type.
        model(mx.zeros((1, 2), mx.int32))
    except ModelError:
        raise
    except Exception as error:
        raise _broken(folder, error) from error
    vocab_size = int(text_config.get("vocab_size") or config.get("vocab_size") or 0)
    return BaseModel(
        model=model,
        folder=folder,
        model_type=config["model_type"],
        num_layers=len(model.layers),
        parameters=get_total_parameters(model),
        dtype=str(compute_dtype).removeprefix("mlx.core."),
        quantization=quantization,
        vocab_size=vocab_size,
        hidden_size=int(text_config.get("hidden_size") or config.get("hidden_size") or 0),
        text_config=text_config,
        quantize=quantize,
        double_quant=options.double_quant,
        quantized_compute=compute,
        passed_over=sum(bool(ENCODER_NAME.search(name)) for name in weight_names(folder)),
        own_vocab=vocab_size,
    )


def load_lazily(folder: Path, config: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return mlx-lm's model, without reading its weights, and its completed config.

    `config` comes from `read_config`, which refuses untrusted code. Raises ModelError if the
    weights are missing or broken, or if a tensor does not fit the config.
    """
    check_weights(folder, config)
    try:
        with without_wildcards(folder) as path:
            trust = bool(config.get("model_file"))
            # mlx-lm reads the file again, which may have other names for RoPE's settings.
            renamed = dict(config)
            return load_model(path, lazy=True, model_config=renamed, trust_remote_code=trust)
    except Exception as error:
        if problem := misfit(error, config):
            raise ModelError(f"{folder / 'config.json'}: {problem}") from error
        # Other errors are mlx-lm's own, such as the name of a variable.
        problem = one_line(error) if isinstance(error, ValueError) else ""
        if reason := why_incomplete(folder, config, problem):
            raise ModelError(reason) from error
        raise _broken(folder, error) from error


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config. Raises TypeError if it is malformed."""
    text_config = config.get("text_config") or config
    if not isinstance(text_config, Mapping):
        raise TypeError("text_config is not an object")
    return text_config


def base_record(base: BaseModel) -> dict[str, Any]:
    """Return the record of a base for its adapters: its fingerprint, and how it was quantised."""
    quantized = {"quantize": base.quantize, "double_quant": base.double_quant}
    return {"base": base_fingerprint(base.folder), **(quantized if base.quantize else {})}


def slow_matmuls(base: BaseModel) -> str | None:
    """Return a warning, with its remedy, if quantised matmuls are slow on this device."""
    if not on_cpu() or base.quantized_compute != QUANTIZED:
        return None
    return (
        "MLX multiplies quantised weights slowly on the CPU: "
        "--quantized-compute dequantized gives the same result many times faster"
    )


def timed_matmuls(base: BaseModel, tokens: int) -> TimedMatmuls | None:
    """Time quantised and dequantised matmul on a GPU; return None if there is no choice."""
    if on_cpu() or base.quantized_compute != QUANTIZED:
        return None
    return time_matmuls(base.model, getattr(mx, base.dtype), tokens)


def with_matmul_form(base: BaseModel, form: str) -> BaseModel:
    """Return a model that computes quantised matmuls in the given form, if the device allows it.

    A model on the CPU, or already dequantised, stays the same.
    """
    if on_cpu() or form == base.quantized_compute or form != DEQUANTIZED:
        return base
    compute = compute_quantized(base.model, getattr(mx, base.dtype), form)
    return replace(base, quantized_compute=compute)


def read_weights(base: BaseModel) -> None:
    """Read the weights of an opened model. Raises ModelError if they are broken."""
    try:
        if base.quantize is not None:
            read_one_by_one(base.model)
        arrays = [value for _, value in tree_flatten(base.model.parameters())]
        if base.shards > 1:
            # A worker reads whole arrays but keeps parts, so it reads the largest first, while
            # memory is free.
            for array in sorted(arrays, key=lambda array: array.nbytes, reverse=True):
                mx.eval(array)
                mx.clear_cache()
        mx.eval(arrays)
    except Exception as error:
        raise _broken(base.folder, error) from error


def _broken(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{folder} cannot be loaded: {one_line(error)}: "
        "its config.json or weights are broken or do not belong together: download it again"
    )


def _choose_dtype(model: nn.Module, dtype: str) -> mx.Dtype:
    if dtype != "auto":
        return getattr(mx, dtype)
    sizes: Counter[mx.Dtype] = Counter()
    for _, parameter in tree_flatten(model.parameters()):
        if mx.issubdtype(parameter.dtype, mx.floating):
            sizes[parameter.dtype] += parameter.size
    return mx.float32 if on_cpu() or not sizes else sizes.most_common(1)[0][0]


# The classes of layers that may be stored in 16 bits, and their replacements.
_STORED_CLASSES: dict[type, Any] = {
    nn.Embedding: StoredEmbedding,
    nn.Linear: StoredLinear,
    SwitchLinear: StoredExperts,
}


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Make a model compute in the dtype.

    The scales of nf4 stay float32. If the CPU computes in float32, 16-bit weight matrices stay
    stored in 16 bits: each use casts them exactly, which takes a few percent of the time but halves
    the memory of weights.
    """
    uncast, casts_stored = set(), on_cpu() and dtype == mx.float32
    for path, module in model.named_modules():
        if isinstance(module, NF4Linear):
            uncast |= {f"{path}.{name}" for name in ("scales", "nested_scales", "nested_mean")}
        elif casts_stored and type(module) in _STORED_CLASSES:
            uncast.add(f"{path}.weight")
    cast_parameters(model, dtype, uncast)

    def stored(module: nn.Module) -> nn.Module | None:
        kind = _STORED_CLASSES.get(type(module))
        return kind(module) if kind and module.weight.dtype != mx.float32 else None

    if casts_stored:
        replace_modules(model, stored)
