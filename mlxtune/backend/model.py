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

from mlxtune.backend.cpu.stored import embed_in_float32, stored_weights
from mlxtune.backend.memory import on_cpu
from mlxtune.backend.model_folder import check_weights, read_config
from mlxtune.core.report import short_number
from mlxtune.errors import ModelError, one_line

# What is read of a config beside what mlx-lm makes of it.
_NUMBERS = ("vocab_size", "hidden_size", "num_attention_heads", "num_experts_per_tok")


@dataclass(frozen=True)
class BaseModel:
    """A model and what is said of it. `dtype` is what it computes in.

    `text_config` is what config.json says of the language model.
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

    def describe(self) -> str:
        """Say in one line what was loaded."""
        quantization = f"quantised ({self.quantization}), " if self.quantization else ""
        return (
            f"{self.model_type}, {self.num_layers} layers, {short_number(self.parameters)} "
            f"parameters, {quantization}computing in {self.dtype}"
        )


def load_base(folder: Path, dtype: str, *, trust_remote_code: bool = False) -> BaseModel:
    """Load a model's weights in the given dtype (`auto`: its own on a GPU, float32 on the CPU).

    Quantised weights stay as they are; what is computed with them is in the dtype.

    Raises ModelError when the folder is incomplete or broken.
    """
    base = open_base(folder, dtype, trust_remote_code=trust_remote_code)
    read_weights(base)
    return base


def open_base(folder: Path, dtype: str, *, trust_remote_code: bool = False) -> BaseModel:
    """Return what `load_base` does, with shapes and dtypes known and no weights read yet.

    Raises ModelError when the folder is incomplete or broken.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    check_weights(folder, config)
    try:
        model, config = load_lazily(folder, config)
        chosen = _choose_dtype(model, dtype)
        _cast(model, chosen)
        text_config = _text_config(config)
        # Nothing is computed, but what cannot be, as with text in place of a number, is found here.
        model(mx.zeros((1, 2), mx.int32))
    except Exception as error:
        raise _broken(folder, error) from error
    return BaseModel(
        model=model,
        folder=folder,
        model_type=config["model_type"],
        num_layers=len(model.layers),
        parameters=mlx_lm_utils.get_total_parameters(model),
        dtype=str(chosen).removeprefix("mlx.core."),
        quantization=_quantization(config.get("quantization")),
        vocab_size=int(text_config.get("vocab_size") or config.get("vocab_size") or 0),
        hidden_size=int(text_config.get("hidden_size") or config.get("hidden_size") or 0),
        text_config=text_config,
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


def read_weights(base: BaseModel) -> None:
    """Read the weights of a model that was opened. Raises ModelError when they are broken."""
    try:
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

    def cast(path: str, parameter: mx.array) -> mx.array:
        # Some architectures need a few parameters in float32 whatever the rest is in.
        castable = mx.issubdtype(parameter.dtype, mx.floating) and (keeps is None or keeps(path))
        return parameter.astype(dtype) if castable and path not in stored else parameter

    parameters = tree_flatten(model.parameters())
    model.load_weights([(path, cast(path, value)) for path, value in parameters], strict=False)
    if stored:
        embed_in_float32(model)


def _quantization(quantization: Mapping[str, Any] | None) -> str | None:
    if not quantization:
        return None
    mode = quantization.get("mode", "affine")
    return f"{quantization.get('bits')}-bit {mode}, group {quantization.get('group_size')}"
