"""The base model: found, checked, loaded by mlx-lm in the compute dtype, and frozen."""

from __future__ import annotations

import json
import re
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
from mlxtune.core.report import short_number
from mlxtune.errors import ModelError, one_line

# What tokenizer and template are made of.
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


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


def find_folder(model_path: str, *, weights: bool = True) -> Path:
    """Return the model's folder, downloaded by mlx-lm when `model_path` is owner/name.

    Without `weights`, only the small files are downloaded.

    Raises ModelError.
    """
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{model_path}: is a file: --model-path takes the folder that holds it")
    if not _REPOSITORY.fullmatch(model_path):
        raise ModelError(f"{model_path}: no such folder: check --model-path")
    try:
        patterns = None if weights else _SMALL_FILES
        return Path(mlx_lm_utils._download(model_path, allow_patterns=patterns))
    except Exception as error:
        raise ModelError(
            f"{model_path}: no such folder, and downloading it failed: {one_line(error)}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model's config.json. Raises ModelError when it has none that names a known type."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder}: has no config.json: is this a model folder?")
    try:
        config = mlx_lm_utils.load_config(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: is not valid JSON: {one_line(error)}: download it again"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path}: names no model_type: is this a language model's folder?")
    if config.get("model_file") is None:
        try:
            mlx_lm_utils._get_classes(config)
        except ValueError as error:
            raise ModelError(
                f"{path}: mlx-lm has no model type {config['model_type']!r}: "
                "upgrade mlx-lm or use another model"
            ) from error
    return config


def vocab_size(folder: Path) -> int:
    """Return how many tokens a model knows by its config.json; 0 where that does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return 0
    for part in (config.get("text_config"), config) if isinstance(config, dict) else ():
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if type(size) is int:
            return size
    return 0


def load_base(folder: Path, dtype: str) -> BaseModel:
    """Load a model's weights in the given dtype (`auto`: its own on a GPU, float32 on the CPU).

    Quantised weights stay as they are; what is computed with them is in the dtype.

    Raises ModelError when the folder is incomplete or broken.
    """
    base = open_base(folder, dtype)
    read_weights(base)
    return base


def open_base(folder: Path, dtype: str) -> BaseModel:
    """Return what `load_base` does, with shapes and dtypes known and no weights read yet.

    Raises ModelError when the folder is incomplete or broken.
    """
    config = read_config(folder)
    if not list(folder.glob("model*.safetensors")):
        raise ModelError(f"{folder}: has no weights (model*.safetensors): download it again")
    try:
        model, config = mlx_lm_utils.load_model(folder, lazy=True)
        chosen = _choose_dtype(model, dtype)
        _cast(model, chosen)
    except Exception as error:
        raise _broken(folder, error) from error
    text_config = config.get("text_config") or config
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
