"""An adapter put into the weights of its base model: a model folder that needs no adapter.

A fused weight is `W + scale * (a b)ᵀ`, of DoRA that with the length of each row set to `m`,
computed in float32 and rounded once to the dtype of the folder. Nothing is computed before it is
written, and what is written is let go, so that no more than a file's worth is in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import dequantize_model, make_shards, save_config

from mlxtune.backend.exports.adapter import Adapter, Update, check_shapes, plain_weight
from mlxtune.backend.model import load_lazily
from mlxtune.backend.model_folder import read_config
from mlxtune.backend.proof import coarsest
from mlxtune.core.certificate import WeightCheck
from mlxtune.core.files import as_output_error
from mlxtune.errors import ModelError, OutputError, one_line

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
_QUANTIZED = (nn.QuantizedLinear, QuantizedSwitchLinear)
# A file of weights is in memory while it is written; mlx-lm's have five times as much.
_SHARD_GB = 1
# What makes a model folder beside its weights and config.json.
_COPIED = (
    *("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"),
    *("additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)
_WRITTEN_ANEW = ("config.json", "adapter_config.json", "certificate.json", "hf_quant_config.json")
# Of one rounding to the dtype, for what float32 itself rounds on the way.
_SLACK = 1.02
_FLOAT32_SLACK = 2.0**-20


def fused_model(
    folder: Path, adapter: Adapter, *, dequantize: bool, trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a base model with the adapter in its weights, none of which is computed yet.

    Weights have the dtype and, unless `dequantize` is given, the quantisation of the folder. The
    second result is the model's config. Raises ModelError where the adapter does not fit.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    try:
        model, config = load_lazily(folder, config)
    except Exception as error:
        raise ModelError(f"{folder}: cannot be loaded: {one_line(error)}") from error
    fused = []
    for name, update in adapter.modules.items():
        module = _module_at(model, name, folder)
        check_shapes(module, update, name)
        fused.append((name, _fused(module, update, adapter.scale, dequantize)))
    model.update_modules(tree_unflatten(fused))
    if dequantize:
        model = dequantize_model(model)
        config.pop("quantization", None)
        config.pop("quantization_config", None)
    return model, config


def write_model(model: nn.Module, config: Mapping[str, Any], base: Path, folder: Path) -> None:
    """Write a model's weights, file by file, its config, and what else its base's folder has.

    The model is spent then: its weights are let go as they are written. Raises OutputError.
    """
    weights = dict(tree_flatten(model.parameters()))
    size = sum(value.nbytes for value in weights.values())
    shards = make_shards(weights, max_file_size_gb=_SHARD_GB)
    weights.clear()
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    weight_map: dict[str, str] = {}
    with as_output_error(folder, "--output"):
        for number in range(len(shards)):
            shard, shards[number] = shards[number], None
            name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            name = name if len(shards) > 1 else "model.safetensors"
            _save(folder / name, shard)
            weight_map |= dict.fromkeys(shard, name)
            del shard
            mx.clear_cache()
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4) + "\n")
        save_config(dict(config), config_path=folder / "config.json")
        _copy_files(base, folder)


def _save(path: Path, tensors: Mapping[str, mx.array]) -> None:
    try:
        mx.save_safetensors(str(path), dict(tensors), metadata={"format": "mlx"})
    except RuntimeError as error:  # as MLX says that a disk is full
        raise OutputError(f"{path}: cannot be written: {one_line(error)}: free space") from error
    expected = sum(value.nbytes for value in tensors.values())
    if path.stat().st_size < expected:
        raise OutputError(f"{path}: was not written whole: free space")


def _copy_files(base: Path, folder: Path) -> None:
    for path in sorted({path for pattern in _COPIED for path in base.glob(pattern)}):
        if path.name in _WRITTEN_ANEW or path.name.endswith(".index.json") or not path.is_file():
            continue
        target = folder / path.relative_to(base)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def _module_at(model: nn.Module, name: str, folder: Path) -> nn.Module:
    module: Any = model
    for part in name.split("."):
        try:
            module = module[int(part)] if isinstance(module, list) else module[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ModelError(f"{folder}: has no {name}, which the adapter is for") from None
    if not isinstance(module, _LINEAR + _EXPERTS):
        raise ModelError(f"{folder}: {name} is no projection, but the adapter is for it")
    if "global_scale" in module:
        raise ModelError(f"{folder}: {name} is quantised with a global scale: it cannot be fused")
    return module


def _updated(module: nn.Module, update: Update, scale: float) -> mx.array:
    """Return what the weight of a module becomes, in float32."""
    weight = plain_weight(module).astype(mx.float32)
    a, b = mx.array(update.a), mx.array(update.b)
    if update.of_experts:
        return weight + (scale * b) @ a
    weight = weight + (scale * b.T) @ a.T
    if update.m is None:
        return weight
    # DoRA, arXiv:2402.09353, equation 5.
    return weight * (mx.array(update.m) / mx.linalg.norm(weight, axis=1))[:, None]


def _fused(module: nn.Module, update: Update, scale: float, dequantize: bool) -> nn.Module:
    """Return a layer with the update in its weight, which has the dtype of before."""
    dtype = plain_weight(module).dtype
    weight = _updated(module, update, scale).astype(dtype)
    if update.of_experts:
        count, rows, columns = weight.shape
        plain: nn.Module = SwitchLinear(columns, rows, count, bias=False)
    else:
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    plain.weight = weight
    if "bias" in module:
        plain.bias = module.bias
    if isinstance(module, _QUANTIZED) and not dequantize:
        return plain.to_quantized(group_size=module.group_size, bits=module.bits, mode=module.mode)
    return plain


def check_fused(
    base: Path, fused: Path, adapter: Adapter, *, dequantize: bool, trust_remote_code: bool
) -> WeightCheck:
    """Compare every tensor of a fused folder with what base folder and adapter make it.

    Both are read from disk again, one module at a time. Fused weights may be off by one rounding to
    their dtype; quantised ones by no more than quantising what they should be makes them; all
    other tensors must be equal.
    """
    trust = trust_remote_code
    before, _ = load_lazily(base, read_config(base, trust_remote_code=trust))
    if dequantize:
        before = _dequantized_others(before, adapter)
    after, _ = load_lazily(fused, read_config(fused, trust_remote_code=trust))
    problems: list[str] = []
    largest = 0.0
    for name, update in adapter.modules.items():
        wanted = _updated(_module_at(before, name, base), update, adapter.scale)
        error, allowed = _errors(_module_at(after, name, fused), wanted)
        largest = max(largest, error)
        if not error <= allowed:
            problems.append(
                f"{name}.weight is off by {error:.3g} of its largest weight, where rounding "
                f"explains {allowed:.3g}"
            )
        mx.clear_cache()
    unchanged = 0
    for name, same in _others(before, after, adapter):
        unchanged += same
        if not same:
            problems.append(f"{name} is not that of the base model")
    return WeightCheck(unchanged, len(adapter.modules), largest, tuple(problems))


def _dequantized_others(model: nn.Module, adapter: Adapter) -> nn.Module:
    """Return a model whose modules that have no update are dequantised."""
    kept = [(name, _module_at(model, name, Path())) for name in adapter.modules]
    model = dequantize_model(model)
    model.update_modules(tree_unflatten(kept))
    return model


def _errors(module: nn.Module, wanted: mx.array) -> tuple[float, float]:
    """Return how far a weight is from what it should be, and how far rounding takes it.

    Both are relative to the largest weight of the matrix.
    """
    written = plain_weight(module)
    dtype = written.dtype
    rounded = wanted.astype(dtype)
    if isinstance(module, _QUANTIZED):
        how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        rounded = mx.dequantize(*mx.quantize(rounded, **how), **how)
    scale = mx.abs(wanted).max()
    off, rounding = (
        mx.abs(each.astype(mx.float32) - wanted).max() / scale for each in (written, rounded)
    )
    return float(np.array(off)), float(np.array(rounding)) * _SLACK + _FLOAT32_SLACK


def _others(before: nn.Module, after: nn.Module, adapter: Adapter) -> Iterator[tuple[str, bool]]:
    """Yield the tensors that no update is for, and whether both models have the same."""
    own = tuple(f"{name}." for name in adapter.modules)
    ours, theirs = (
        {
            name: value
            for name, value in tree_flatten(model.parameters())
            if not name.startswith(own) or name.endswith(".bias")
        }
        for model in (before, after)
    )
    for model in (before, after):
        model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.pop(name, None), theirs.pop(name, None)
        if one is None or other is None or one.dtype != other.dtype:
            yield name, False
        else:
            yield name, bool(np.array(mx.array_equal(one, other, equal_nan=True)))


def stored_dtype(model: nn.Module) -> str:
    """Return the coarsest floating dtype that a model's weights have."""
    return coarsest(
        *(str(v.dtype).removeprefix("mlx.core.") for _, v in tree_flatten(model.parameters()))
    )


def is_quantized(model: nn.Module, adapter: Adapter) -> bool:
    """Tell whether any weight that the adapter went into is quantised."""
    return any(isinstance(_module_at(model, name, Path()), _QUANTIZED) for name in adapter.modules)
