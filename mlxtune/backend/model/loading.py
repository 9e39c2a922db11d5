"""The base model: found, checked, loaded by mlx-lm in the compute dtype, and frozen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlxtune.backend.model.dequantized import DEQUANTIZED, QUANTIZED, compute_quantized
from mlxtune.backend.model.memory import on_cpu
from mlxtune.backend.model.model_folder import check_weights, read_config
from mlxtune.backend.model.quantize import (
    already_quantized,
    kept_as_they_are,
    quantize_lazily,
    read_one_by_one,
)
from mlxtune.backend.model.stored import embed_in_float32, stored_weights
from mlxtune.core.text import short_number
from mlxtune.errors import ModelError, one_line

# What is read of a config beside what mlx-lm makes of it.
_NUMBERS = ("vocab_size", "hidden_size", "num_attention_heads", "num_experts_per_tok")


@dataclass(frozen=True)
class BaseModel:
    """A model and what is said of it. `dtype` is what it computes in.

    `text_config` is what config.json says of the language model. `quantization` describes quantised
    weights, `quantize` what --quantize made of them while loading, `quantized_compute` how they are
    computed with; None for none.
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

    def describe(self) -> str:
        """Say in one line what was loaded."""
        quantization = ""
        if self.quantization:
            when = " while loading" if self.quantize else ""
            quantization = f"quantised{when} ({self.quantization}), "
        unpacked = ", matrices dequantised for each use"
        return (
            f"{self.model_type}, {self.num_layers} layers, {short_number(self.parameters)} "
            f"parameters, {quantization}computing in {self.dtype}"
            f"{unpacked if self.quantized_compute == DEQUANTIZED else ''}"
        )


def load_base(folder: Path, dtype: str, **options: Any) -> BaseModel:
    """Open a model, as `open_base` does with these options, and read its weights.

    Raises ModelError when the folder is incomplete or broken, or cannot be quantised.
    """
    base = open_base(folder, dtype, **options)
    read_weights(base)
    return base


def open_base(
    folder: Path,
    dtype: str,
    *,
    trust_remote_code: bool = False,
    quantize: str | None = None,
    double_quant: bool = False,
    quantized_compute: str = "auto",
) -> BaseModel:
    """Return a model in the given dtype (`auto`: its own on a GPU, float32 on the CPU).

    Shapes and dtypes are known then, and no weights read yet. Quantised weights stay as they are;
    what is computed with them is in the dtype. With `quantize`, a format of --quantize, those of a
    full-precision model are quantised one by one as they are read; `double_quant` goes with nf4.
    `quantized_compute` is that of `compute_quantized`.

    Raises ModelError when the folder is incomplete or broken, or cannot be quantised.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    check_weights(folder, config)
    if quantize is not None and already_quantized(config):
        raise ModelError(
            f"{folder}: is quantised already: leave out --quantize {quantize}, "
            "or name the full-precision model"
        )
    try:
        model, config = load_lazily(folder, config)
        chosen = _choose_dtype(model, dtype)
        quantization = _quantization(config.get("quantization"))
        if quantize is not None:
            quantization = quantize_lazily(model, config, quantize, double_quant)
        _cast(model, chosen)
        compute = compute_quantized(model, chosen, quantized_compute)
        text_config = _text_config(config)
        # Nothing is computed, but what cannot be, as with text in place of a number, is found here.
        model(mx.zeros((1, 2), mx.int32))
    except ModelError:
        raise
    except Exception as error:
        raise _broken(folder, error) from error
    return BaseModel(
        model=model,
        folder=folder,
        model_type=config["model_type"],
        num_layers=len(model.layers),
        parameters=mlx_lm_utils.get_total_parameters(model),
        dtype=str(chosen).removeprefix("mlx.core."),
        quantization=quantization,
        vocab_size=int(text_config.get("vocab_size") or config.get("vocab_size") or 0),
        hidden_size=int(text_config.get("hidden_size") or config.get("hidden_size") or 0),
        text_config=text_config,
        quantize=quantize,
        double_quant=double_quant,
        quantized_compute=compute,
    )


def load_lazily(folder: Path, config: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Have mlx-lm make a model with no weights read, of a folder whose code, if any, is trusted.

    `config` is what `read_config` returns, and so is the second result, as mlx-lm completes it.
    """
    # Asked for where it is needed alone: mlx-lm knows the option since 0.31.4.
    trust = {"trust_remote_code": True} if config.get("model_file") else {}
    return mlx_lm_utils.load_model(folder, lazy=True, **trust)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config says of the language model. Raises TypeError where it is no config."""
    text_config = config.get("text_config") or config
    if not isinstance(text_config, Mapping):
        raise TypeError("text_config is no object")
    for name in _NUMBERS:
        number = text_config.get(name) or config.get(name)
        if number is not None and not isinstance(number, int):
            raise TypeError(f"{name} is no whole number")
    return text_config


def said_of(base: BaseModel) -> dict[str, Any]:
    """Return what an adapter says of its base, where that was not loaded as the folder has it."""
    if base.quantize is None:
        return {}
    return {"quantize": base.quantize, "double_quant": base.double_quant}


def slow_products(base: BaseModel) -> str | None:
    """Return what is slow on this device of a model's quantised products, and what would help."""
    if not on_cpu() or base.quantized_compute is None:
        return None
    if base.quantized_compute == QUANTIZED:
        return (
            "MLX's products with quantised weights are slow on the CPU: "
            "--quantized-compute dequantized gives the same and is many times faster"
        )
    if any(isinstance(module, QuantizedSwitchLinear) for _, module in base.model.named_modules()):
        return (
            "products with quantised experts are slow on the CPU: "
            "use a base whose weights are not quantised if memory allows"
        )
    return None


def read_weights(base: BaseModel) -> None:
    """Read the weights of a model that was opened. Raises ModelError when they are broken."""
    try:
        if base.quantize is not None:
            read_one_by_one(base.model)
        mx.eval(base.model.parameters())
    except Exception as error:
        raise _broken(base.folder, error) from error


def _broken(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{folder}: cannot be loaded: {one_line(error)}: "
        "its config.json or weights are broken or do not belong together: download it again"
    )


def _choose_dtype(model: nn.Module, dtype: str) -> mx.Dtype:
    if dtype != "auto":
        return getattr(mx, dtype)
    if on_cpu():
        return mx.float32
    return _own_dtype(model)


def _own_dtype(model: nn.Module) -> mx.Dtype:
    sizes: Counter[mx.Dtype] = Counter()
    for _, parameter in tree_flatten(model.parameters()):
        if mx.issubdtype(parameter.dtype, mx.floating):
            sizes[parameter.dtype] += parameter.size
    return sizes.most_common(1)[0][0] if sizes else mx.float32


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Have a model compute in the dtype.

    Where a wider dtype than that of the file is computed in on the CPU, big matrices stay as they
    are: each use casts them, which is exact and a few percent of its work, and they take half the
    memory.
    """
    keeps = getattr(model, "cast_predicate", None)
    stored = stored_weights(model) if on_cpu() and dtype == mx.float32 else set()
    kept = stored | kept_as_they_are(model)

    def cast(path: str, parameter: mx.array) -> mx.array:
        # Some architectures need a few parameters in float32 whatever the rest is in.
        castable = mx.issubdtype(parameter.dtype, mx.floating) and (keeps is None or keeps(path))
        return parameter.astype(dtype) if castable and path not in kept else parameter

    parameters = tree_flatten(model.parameters())
    model.load_weights([(path, cast(path, value)) for path, value in parameters], strict=False)
    if stored:
        embed_in_float32(model)


def _quantization(quantization: Mapping[str, Any] | None) -> str | None:
    if not quantization:
        return None
    mode = quantization.get("mode", "affine")
    return f"{quantization.get('bits')}-bit {mode}, group {quantization.get('group_size')}"
