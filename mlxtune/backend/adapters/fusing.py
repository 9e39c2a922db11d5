"""Fuses an adapter into its base model's weights, to make a model folder that needs no adapter.

A fused weight is `W + scale * (a b)ᵀ`, with its rows scaled to the norms `m` for DoRA, computed in
float32 and rounded once to the dtype of the base's weight. Weights are computed when they are
written and freed afterwards, so that at most one file's weights are in memory.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.utils import make_shards, save_config

from mlxtune.backend.adapters.certificate import WeightCheck
from mlxtune.backend.adapters.compare_logits import coarsest
from mlxtune.backend.adapters.file_formats.adapter import Adapter, WeightUpdate, check_fits
from mlxtune.backend.adapters.storage import (
    AS_BASE,
    PLAIN,
    Storage,
    add_to_config,
    layer_like,
    quantized_among,
    storages_for,
)
from mlxtune.backend.lora.targets import PROJECTIONS
from mlxtune.backend.models.loading import load_lazily
from mlxtune.backend.models.model_folder import ENCODER_NAME, json_object, read_config, weight_names
from mlxtune.backend.models.quantize import quantize_lazily, quantized_config
from mlxtune.backend.models.stored_layers import dequantized_weight
from mlxtune.config.data_config import AS_STORED, BaseOptions
from mlxtune.config.limits import TooLargeError, limits_of
from mlxtune.core.files.reading import check_file, target_outside
from mlxtune.core.files.writing import as_output_error, copy_file, make_folder, write_file
from mlxtune.errors import ModelError, OutputError, one_line

# The maximum size of a weight file, whose weights are in memory while it is written. mlx-lm's
# maximum is five times as large.
_SHARD_GB = 1
# Patterns of the files that are copied from a model folder.
_COPIED_PATTERNS = (
    *("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"),
    *("additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)
# Entries of a config that describe parts for images or sound.
_IMAGE_KEYS = re.compile(r"(vision|visual|image|video|audio|speech|mm|multi_?modal|projector)_")
_UNCOPIED_FILES = (
    "config.json",
    "adapter_config.json",
    "certificate.json",
    "hf_quant_config.json",
)
# A factor and an addend that allow for float32 rounding before the rounding to the dtype.
_SLACK_FACTOR = 1.02
_FLOAT32_SLACK = 2.0**-20


@dataclass(frozen=True)
class _Base:
    """A lazily loaded model. If loading quantised it, `dtypes` has the weights' earlier dtypes."""

    model: nn.Module
    config: dict[str, Any]
    dtypes: Mapping[str, mx.Dtype]

    def dtype_of(self, name: str, module: nn.Module) -> mx.Dtype:
        """Return the dtype that a module's weight has without quantisation."""
        if name in self.dtypes or "scales" not in module:
            return self.dtypes.get(name) or module.weight.dtype
        # MLX dequantises to bfloat16 if the scales are not floating-point numbers.
        floating = mx.issubdtype(module.scales.dtype, mx.floating)
        return module.scales.dtype if floating else mx.bfloat16


@dataclass(frozen=True)
class Fusion:
    """A base model's folder, and the adapter to fuse into its weights.

    `options` open the base as in training.
    """

    folder: Path
    adapter: Adapter
    options: BaseOptions = AS_STORED


def _open(folder: Path, options: BaseOptions) -> _Base:
    config = read_config(folder, trust_remote_code=options.trust_remote_code)
    model, config = load_lazily(folder, config)
    dtypes = {}
    if options.quantize is not None:
        modules = model.named_modules()
        dtypes = {name: module.weight.dtype for name, module in modules if "weight" in module}
        quantize_lazily(model, config, options.quantize, options.double_quant)
    return _Base(model, config, dtypes)


def fused_model(
    fusion: Fusion, *, dequantize: bool, storage: Storage = AS_BASE
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a base model with the adapter fused into its lazy weights, and the model's config.

    Weights keep the base's dtype and, without `dequantize`, its quantisation, which must not be
    nf4. Weights with an update use `storage`. Raises ModelError if the adapter does not fit.
    """
    base = _open(fusion.folder, fusion.options)
    model, config = base.model, base.config
    fused = []
    for name, (module, weight) in _merged(base, fusion).items():
        layer = _stored_layer(name, module, weight, PLAIN if dequantize else storage)
        fused.append((name, module, layer))
    if not dequantize and fusion.options.quantize is not None:
        config |= quantized_config(model, fusion.options.quantize)
    model.update_modules(tree_unflatten([(name, layer) for name, _, layer in fused]))
    add_to_config(config, fused)
    if dequantize:
        _dequantize(base)
        config.pop("quantization", None)
        config.pop("quantization_config", None)
    return model, config


def merged_weights(fusion: Fusion) -> dict[str, tuple[nn.Module, mx.array]]:
    """Return each trained projection of a base, and its merged weight, which is computed lazily.

    Raises ModelError if the adapter does not fit.
    """
    return _merged(_open(fusion.folder, fusion.options), fusion)


def _merged(base: _Base, fusion: Fusion) -> dict[str, tuple[nn.Module, mx.array]]:
    merged, modules = {}, dict(base.model.named_modules())
    for name, update in fusion.adapter.modules.items():
        module = _projection(modules, name, fusion.folder)
        check_fits(module, update, name)
        weight = _merged_weight(name, module, update, fusion.adapter.scale)
        merged[name] = module, weight.astype(base.dtype_of(name, module))
    return merged


def _stored_layer(name: str, module: nn.Module, weight: mx.array, storage: Storage) -> nn.Module:
    layer = layer_like(module, weight, storage)
    if (rounded := storage.rounded.get(name)) is not None:
        layer.update(dict(rounded))
    return layer


def _dequantize(base: _Base, kept: Collection[str] = ()) -> None:
    plain = []
    for name, module in base.model.named_modules():
        if name not in kept and "scales" in module:
            weight = _weight(name, module).astype(base.dtype_of(name, module))
            plain.append((name, layer_like(module, weight, PLAIN)))
    base.model.update_modules(tree_unflatten(plain))


def _weight(name: str, module: nn.Module) -> mx.array:
    if "global_scale" in module:
        raise ModelError(
            f"{name} is quantised with a global scale, which mlxtune cannot dequantise"
        )
    return dequantized_weight(module)


def write_model(
    model: nn.Module, config: Mapping[str, Any], base: Path, folder: Path, *, text_only: bool
) -> int:
    """Write a model's config, and its weights one file at a time; copy the base folder's other
    files.

    The base's weights for images or sound are copied if they fit the written ones. Otherwise, or
    for `text_only`, they are left out, the config describes a model of text, and their number is
    returned.

    The model cannot be used afterwards: its weights are freed as they are written. Raises
    OutputError.
    """
    weights = dict(tree_flatten(model.parameters()))
    config, left_out = dict(config), 0
    if others := _other_parts(base, weights):
        if not text_only and _fits_base(weights, others, base):
            weights |= others
        else:
            left_out = len(others)
            config = {name: value for name, value in config.items() if not _IMAGE_KEYS.match(name)}
    else:
        config.pop("vision_config", None)
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
        content = json.dumps(index, indent=4) + "\n"
        write_file(folder / "model.safetensors.index.json", [content.encode()])
        path = folder / "config.json"
        save_config(dict(config), config_path=path)
        if "vision_config" in config:  # which save_config leaves out
            written = json_object(path) | {"vision_config": config["vision_config"]}
            write_file(path, [json.dumps(dict(sorted(written.items())), indent=4).encode()])
        check_copied(base)
        for path in filter(Path.is_file, _copied_files(base)):
            target = folder / path.relative_to(base)
            make_folder(target.parent)
            copy_file(path, target)
    return left_out


def _other_parts(base: Path, weights: Collection[str]) -> dict[str, mx.array]:
    """Return a model folder's tensors that the text model lacks, without reading their data."""
    files = (mx.load(str(path)) for path in sorted(base.glob("model*.safetensors")))
    return {
        name: value
        for file in files
        if isinstance(file, dict)
        for name, value in file.items()
        if ENCODER_NAME.search(name) and name not in weights
    }


def _fits_base(weights: Collection[str], others: Collection[str], base: Path) -> bool:
    """Return whether weights have the names of the base's, so that one program reads all parts.

    Parts that are quantised need the base's quantisation, which the written config may lack.
    """
    stored = {name.rpartition(".")[0] for name in weight_names(base)}
    quantized = any(name.endswith(".scales") for name in others)
    kept = any(name.endswith(".scales") for name in weights) or not quantized
    return kept and {name.rpartition(".")[0] for name in weights} <= stored


def _save(path: Path, tensors: Mapping[str, mx.array]) -> None:
    try:
        mx.save_safetensors(str(path), dict(tensors), metadata={"format": "mlx"})
    except RuntimeError as error:  # MLX's error for a full disk
        raise OutputError(
            f"{path} cannot be written: {one_line(error)}: free some disk space"
        ) from error
    if path.stat().st_size < sum(value.nbytes for value in tensors.values()):
        raise OutputError(f"{path} was only written in part: free some disk space")


def _copied_files(base: Path) -> Iterator[Path]:
    for path in sorted({path for pattern in _COPIED_PATTERNS for path in base.glob(pattern)}):
        if path.name not in _UNCOPIED_FILES and not path.name.endswith(".index.json"):
            yield path


def check_copied(base: Path) -> None:
    """Raise ModelError if a file to be copied is too large, or is a link out of the folder.

    A link may lead to a private file, and the copy is made to be shared.
    """
    for path in _copied_files(base):
        if target := target_outside(path, base):
            raise ModelError(
                f"{path}: links to {target}, which is outside the model's folder and would be "
                "copied: replace the link with the file, or remove it"
            )
        try:
            if path.is_file():
                check_file(path, limits_of(path.name))
        except TooLargeError as error:
            raise ModelError(f"{path} cannot be copied: {error}: download it again") from error


def _projection(modules: Mapping[str, nn.Module], name: str, folder: Path) -> nn.Module:
    module = modules.get(name)
    if module is None:
        raise ModelError(f"{folder} has no {name}, which the adapter needs")
    if not isinstance(module, PROJECTIONS):
        raise ModelError(f"{folder}: {name} is not a projection, but the adapter changes it")
    return module


def _merged_weight(name: str, module: nn.Module, update: WeightUpdate, scale: float) -> mx.array:
    weight = _weight(name, module)
    a, b = mx.array(update.a), mx.array(update.b)
    if update.is_of_experts:
        return weight + (scale * b) @ a
    weight = weight + (scale * b.T) @ a.T
    if update.m is None:
        return weight
    # DoRA, arXiv:2402.09353, equation 5.
    return weight * (mx.array(update.m) / mx.linalg.norm(weight, axis=1))[:, None]


def check_fused(fusion: Fusion, fused: Path, *, dequantize: bool, storage: Storage) -> WeightCheck:
    """Compare every tensor of a fused folder with the value computed from the base and the adapter.

    The base's folder and `fused` are read again, one module at a time. Fused weights may differ by
    one rounding to their dtype, quantised weights by the error of quantising the exact weight. All
    other tensors must be equal.
    """
    adapter, opened = fusion.adapter, _open(fusion.folder, fusion.options)
    before = opened.model
    if dequantize:
        _dequantize(opened, kept=adapter.modules.keys())
    after = _open(fused, fusion.options.as_stored).model
    problems: list[str] = []
    largest = 0.0
    bases, written = dict(before.named_modules()), dict(after.named_modules())
    for name, update in adapter.modules.items():
        module = _projection(bases, name, fusion.folder)
        wanted = _merged_weight(name, module, update, adapter.scale)
        dtype = opened.dtype_of(name, module)
        form = PLAIN if dequantize else storage
        expected = _stored_layer(name, module, wanted.astype(dtype), form)
        error, allowed = _error_and_tolerance(_projection(written, name, fused), expected, wanted)
        largest = max(largest, error)
        if not error <= allowed:
            problems.append(
                f"{name}.weight is off by {error:.3g} of its largest entry, but rounding explains "
                f"only {allowed:.3g}"
            )
        mx.clear_cache()
    unchanged = 0
    for name, same in _others(before, after, adapter):
        unchanged += same
        if not same:
            problems.append(f"{name} differs from the base model")
    return WeightCheck(unchanged, len(adapter.modules), largest, tuple(problems))


def _error_and_tolerance(
    module: nn.Module, expected: nn.Module, wanted: mx.array
) -> tuple[float, float]:
    """Return a weight's error and its tolerance, relative to the largest expected entry."""
    off, rounding = (
        mx.abs(dequantized_weight(each) - wanted).max() / mx.abs(wanted).max()
        for each in (module, expected)
    )
    return float(off), float(rounding) * _SLACK_FACTOR + _FLOAT32_SLACK


def _others(before: nn.Module, after: nn.Module, adapter: Adapter) -> Iterator[tuple[str, bool]]:
    """Yield the name of each tensor without an update, and whether it is equal in both models."""
    prefixes, tensors = tuple(f"{name}." for name in adapter.modules), []
    for model in (before, after):
        tensors.append(
            {
                name: value
                for name, value in tree_flatten(model.parameters())
                if not name.startswith(prefixes) or name.endswith(".bias")
            }
        )
        model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    expected, written = tensors
    for name in sorted(expected.keys() | written.keys()):
        one, other = expected.pop(name, None), written.pop(name, None)
        alike = one is not None and other is not None and one.dtype == other.dtype
        yield name, alike and bool(mx.array_equal(one, other, equal_nan=True))


def stored_dtype(model: nn.Module) -> str:
    """Return the coarsest floating-point dtype of a model's tensors, such as bfloat16."""
    return coarsest(
        *(str(v.dtype).removeprefix("mlx.core.") for _, v in tree_flatten(model.parameters()))
    )


def updates_quantized(model: nn.Module, adapter: Adapter) -> bool:
    """Return whether any weight with an update is quantised."""
    return bool(quantized_among(_trained(model, adapter)))


def storages(fusion: Fusion, bits: int | None = None) -> list[Storage]:
    """Return what `storages_for` returns for the weights with an update; read no weights."""
    model = _open(fusion.folder, fusion.options).model
    return storages_for(_trained(model, fusion.adapter), bits)


def _trained(model: nn.Module, adapter: Adapter) -> list[nn.Module]:
    modules = dict(model.named_modules())
    return [modules[name] for name in adapter.modules if name in modules]
