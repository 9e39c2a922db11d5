"""Writes and reads PEFT's adapter folder: adapter_model.safetensors and adapter_config.json.

PEFT's `lora_A.weight` (rank, in) and `lora_B.weight` (out, rank) are the transposes of mlx-lm's
`lora_a` and `lora_b`, and PEFT's `lora_magnitude_vector` (out,) is `m`. The update is
`lora_alpha / r * B A`, with √r in place of r for rsLoRA.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.adapter_folder import (
    is_valid_scale,
    read_adapter_config,
    valid_dropout,
    write_tensors,
)
from mlxtune.backend.adapters.file_formats import peft_experts
from mlxtune.backend.adapters.file_formats.adapter import (
    Adapter,
    Matrix,
    WeightUpdate,
    path_in_layer,
)
from mlxtune.backend.models.model_folder import ENCODER_NAME, json_object, weight_names
from mlxtune.core.files.writing import write_json
from mlxtune.core.formatting import join_few
from mlxtune.errors import ModelError, one_line

WEIGHTS = "adapter_model.safetensors"
PICKLED_WEIGHTS = "adapter_model.bin"
CONFIG = "adapter_config.json"
# From `layers.N` on, a module has the same name in PEFT and mlx-lm.
_LAYER_NAME = re.compile(r"(?:^|\.)(layers\.\d+\..+)$")
_PREFIX = "base_model.model."
# In models with images, files may name the language part as transformers 4 did. The modules of some
# types still have these names.
_LANGUAGE_PREFIX = re.compile(r"^(language_model\.model|model(?!\.language_model))\.")
_STORED_NAME_TYPES = ("llama4",)
_MAGNITUDE = "lora_magnitude_vector"
_PART = re.compile(rf"(.+?)\.(lora_A|lora_B|{_MAGNITUDE})(?:\.default)?(?:\.weight)?")
# rank_pattern and alpha_pattern are untrusted regular expressions, which might never finish
# matching, so only names without repetitions or groups are accepted.
_NAMES = re.compile(r"(?:[\w.^|-]|\\[.-])+")
# Limits of an adapter's size when padded to one rank: in bytes, or if larger, as a multiple of the
# unpadded size.
_MAX_PADDED_BYTES, _MAX_PADDED_RATIO = 256 * 2**20, 16
# Features of PEFT's adapters that mlx-lm's LoRA does not have.
_UNSUPPORTED_KEYS = (
    *("modules_to_save", "trainable_token_indices", "layer_replication"),
    *("lora_bias", "fan_in_fan_out", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)


def write_peft(adapter: Adapter, base: Path, folder: Path) -> None:
    """Write a PEFT folder, with the names that transformers gives the base model's modules.

    Raises ModelError if PEFT cannot hold the adapter, and OutputError if writing fails.
    """
    model_type = str(json_object(base / "config.json").get("model_type"))
    placed = model_type in peft_experts.EXPERTS_PATHS
    adapter.check_plain(f"PEFT's format for {model_type}", dora=True, experts=placed)
    weights = weight_names(base)
    stored = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    has_images = any(
        ENCODER_NAME.search(name) or name.startswith("language_model.") for name in stored
    )
    present = {_module_name(name, model_type) for name in stored} if has_images else stored
    # All-zero updates are padding: mlx-lm needs the same modules in every layer.
    changed = {path: each for path, each in adapter.modules.items() if each.a.any() or each.b.any()}
    changed = changed or dict(adapter.modules)
    modules = {path: each for path, each in changed.items() if not each.is_of_experts}
    names = _match(modules, present, str(base))
    experts = {path: each for path, each in changed.items() if each.is_of_experts}
    tensors, ranks = _expert_tensors(experts, model_type, present)
    parameters = sorted(".".join(name.rsplit(".", 2)[1:]) for name in ranks)
    for path, update in modules.items():
        rank, name = _unpadded_rank(update), f"{_PREFIX}{names[path]}"
        ranks[names[path]] = rank
        tensors[f"{name}.lora_A.weight"] = update.a[:, :rank].T
        tensors[f"{name}.lora_B.weight"] = update.b[:rank].T
        if update.m is not None:
            tensors[f"{name}.{_MAGNITUDE}"] = update.m
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    selected = {names[path]: path_in_layer(path) for path in modules}
    # Without the files' weights for images, last names may match modules for images.
    targets, layers = (
        (sorted(selected), None) if has_images else _shortest_targets(selected, present)
    )
    rank = max(ranks.values())
    patterns = {re.escape(name): each for name, each in sorted(ranks.items()) if each != rank}
    write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": adapter.model or str(base),
            "inference_mode": True,
            "r": rank,
            "lora_alpha": adapter.scale * rank,
            "lora_dropout": adapter.dropout,
            "target_modules": targets,
            "layers_to_transform": layers,
            **({"target_parameters": sorted(set(parameters))} if parameters else {}),
            "rank_pattern": patterns,
            "alpha_pattern": {name: adapter.scale * each for name, each in patterns.items()},
            "use_dora": adapter.is_dora,
            "use_rslora": False,
            "bias": "none",
            "fan_in_fan_out": False,
            "modules_to_save": None,
        },
    )


def _module_name(name: str, model_type: str) -> str:
    """Return the name in transformers 5 of a stored module of a model with images."""
    if model_type in _STORED_NAME_TYPES or ENCODER_NAME.search(name):
        return name
    return _LANGUAGE_PREFIX.sub("model.language_model.", name)


def _expert_tensors(
    experts: Mapping[str, WeightUpdate], model_type: str, present: Iterable[str]
) -> tuple[dict[str, Matrix], dict[str, int]]:
    """Return the experts' tensors, and the rank of each stacked parameter of transformers."""
    tensors: dict[str, Matrix] = {}
    ranks: dict[str, int] = {}
    if not experts:
        return tensors, ranks
    prefix = Counter(
        name[: tail.start(1)]
        for name in present
        if (tail := _LAYER_NAME.search(name)) and not ENCODER_NAME.search(name)
    ).most_common(1)[0][0]
    updates = peft_experts.joined(experts, model_type)
    for (layer, parameter), update in updates.items():
        module = f"{prefix}layers.{layer}.{peft_experts.EXPERTS_PATHS[model_type]}"
        ranks[f"{module}.{parameter}"] = update.rank
        others = [name for number, name in updates if number == layer]
        name = f"{_PREFIX}{peft_experts.wrapped(module, others)[parameter]}"
        a, b = peft_experts.to_matrices(update)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    return tensors, ranks


def _unpadded_rank(update: WeightUpdate) -> int:
    """Return an update's rank without the padding, where both `a` and `b` are zero."""
    used = np.flatnonzero(update.a.any(axis=0) | update.b.any(axis=1))
    return int(used[-1]) + 1 if len(used) else update.a.shape[1]


def read_peft(
    folder: Path, config: Mapping[str, Any], modules: Mapping[str, nn.Module], model_type: str
) -> Adapter:
    """Read a PEFT folder's adapter for a base model of this type with these modules.

    `config` is the folder's config, from `read_config`. Lower ranks are padded with zeros to the
    largest, and `b` absorbs differing scales. Raises ModelError, for example for features that
    mlx-lm's LoRA does not have.
    """
    weights = folder / WEIGHTS
    if config.get("target_parameters") and model_type not in peft_experts.EXPERTS_PATHS:
        raise ModelError(
            f"{folder / CONFIG} has target_parameters, which are not supported for {model_type}: "
            "merge the adapter into its base model with PEFT's merge_and_unload instead"
        )
    parts = _parts(weights, dora=bool(config.get("use_dora")))
    experts = _expert_parts(config, parts, model_type)
    names = _match(sorted(parts.keys() - experts.keys()), modules, "the base model")
    updates_and_scales: dict[str, tuple[WeightUpdate, float]] = {}
    for name, module in names.items():
        a, b = parts[name]["lora_A"], parts[name]["lora_B"]
        _, scale = _rank_and_scale(folder, config, name, len(a))
        updates_and_scales[module] = WeightUpdate(a.T, b.T, parts[name].get(_MAGNITUDE)), scale
    stacks = peft_experts.stacks(modules) if experts else {}
    for name, (module, parameter) in experts.items():
        a, b = parts[name]["lora_A"], parts[name]["lora_B"]
        rank, scale = _rank_and_scale(folder, config, f"{module}.{parameter}", len(a), stacked=True)
        update, (layer, _) = peft_experts.from_matrices(a, b, rank), path_in_layer(module)
        for projection, half in peft_experts.gate_up_and_down(
            parameter, update, model_type
        ).items():
            if (layer, projection) not in stacks:
                raise ModelError(f"the base model has no experts for {name}.{projection}")
            updates_and_scales[stacks[layer, projection]] = half, scale
    # The most common scale, so that most modules stay bit-identical.
    scale = Counter(scale for _, scale in updates_and_scales.values()).most_common(1)[0][0]
    rank = max(update.rank for update, _ in updates_and_scales.values())
    _check_padding(weights, [update for update, _ in updates_and_scales.values()], rank)
    with np.errstate(over="ignore"):
        updates = {
            name: each.padded(rank, own / scale) for name, (each, own) in updates_and_scales.items()
        }
    if not all(np.isfinite(update.b).all() for update in updates.values()):
        raise ModelError("the scales of the adapter's modules differ too much for one scale")
    return Adapter(
        scale=scale,
        modules=updates,
        dropout=valid_dropout(folder / CONFIG, "lora_dropout", config.get("lora_dropout")),
        model=base_of(config),
    )


def _expert_parts(
    config: Mapping[str, Any], parts: Iterable[str], model_type: str
) -> dict[str, tuple[str, str]]:
    """Map each part that belongs to experts to its module and parameter in transformers."""
    targets = [f".{target_parameter}" for target_parameter in config.get("target_parameters") or ()]
    parts_by_name: dict[str, tuple[str, str]] = {}
    for module in {re.sub(r"(\.base_layer)+$", "", name) for name in parts} if targets else ():
        if module.endswith(f".{peft_experts.EXPERTS_PATHS[model_type]}"):
            names = [
                name
                for name in peft_experts.EXPERT_PARAMETERS
                if any(f".{module}.{name}".endswith(target) for target in targets)
            ]
            wrapped_names = peft_experts.wrapped(module, names)
            parts_by_name |= {
                wrapped_name: (module, name) for name, wrapped_name in wrapped_names.items()
            }
    return {name: each for name, each in parts_by_name.items() if name in set(parts)}


def _match(wanted: Iterable[str], present: Iterable[str], where: str) -> dict[str, str]:
    """Map each wanted module to its name in `present`, where the name's prefix may differ.

    Names that differ are matched from the layer number on. Raises ModelError for modules that have
    no name, several names, or the same name as another module. `where` describes the source of
    `present`.
    """
    present = set(present)
    by_tail: dict[str, list[str]] = {}
    for name in present:
        if (tail := _LAYER_NAME.search(name)) and not ENCODER_NAME.search(name):
            by_tail.setdefault(tail[1], []).append(name)
    matches, missing = {}, []
    for name in wanted:
        tail = _LAYER_NAME.search(name)
        others = by_tail.get(tail[1], []) if tail else []
        if name in present:
            matches[name] = name
        elif len(others) == 1 and not ENCODER_NAME.search(name):
            matches[name] = others[0]
        else:
            missing.append(name)
    uses = Counter(matches.values())
    if missing := missing or [name for name, path in matches.items() if uses[path] > 1]:
        raise ModelError(f"{where} does not have exactly one module for {join_few(missing)}")
    return matches


def _shortest_targets(
    selected: Mapping[str, tuple[int, str]], present: Iterable[str]
) -> tuple[list[str], list[int] | None]:
    """Return the target_modules and layers_to_transform that select exactly the chosen modules.

    `selected` maps a module to its layer and its path in the layer; `present` are all modules. Full
    names are returned if last names would match other modules too.
    """
    layers = sorted({layer for layer, _ in selected.values()})
    last_names = sorted({path.rsplit(".", 1)[-1] for _, path in selected.values()})
    named = {name for name in present if name.rsplit(".", 1)[-1] in last_names}
    if named == set(selected):
        return last_names, None
    # PEFT takes the first number in a module's name as its layer.
    numbers = {name: re.search(r"\.[^.]*\.(\d+)\.", name) for name in named}
    if {name for name, each in numbers.items() if each and int(each[1]) in layers} == set(selected):
        return last_names, layers
    return sorted(selected), None


def base_of(config: Mapping[str, Any]) -> str:
    """Return the name or path of the base model in a PEFT config, or an empty string."""
    return str(config.get("base_model_name_or_path") or "")


def read_peft_config(folder: Path) -> dict[str, Any]:
    """Return the checked config of a PEFT folder. Raises ModelError."""
    path = folder / CONFIG
    config = read_adapter_config(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{path}: peft_type is {config.get('peft_type')!r:.40}: only LORA is supported"
        )
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ModelError(f"{path}: target_parameters must be a list of names")
    refused = [name for name in _UNSUPPORTED_KEYS if config.get(name)]
    if config.get("bias", "none") != "none":
        refused.append("bias")
    if refused:
        raise ModelError(
            f"{path} has {', '.join(refused)}, which mlx-lm's LoRA does not support: "
            "merge the adapter into its base model with PEFT's merge_and_unload instead"
        )
    return config


def _parts(path: Path, *, dora: bool) -> dict[str, dict[str, Matrix]]:
    """Read a file's tensors by module and part, such as `lora_A`. Raises ModelError."""
    parts: dict[str, dict[str, Matrix]] = {}
    others = []
    for name, value in AdapterFile(path).read_tensors().items():
        if match := _PART.fullmatch(name.removeprefix(_PREFIX)):
            parts.setdefault(match[1], {})[match[2]] = np.array(value)
        else:
            others.append(name)
    if others:
        raise ModelError(
            f"{path} has tensors that mlx-lm's LoRA does not support: {join_few(others)}"
        )
    if not parts:
        raise ModelError(f"{path} has no LoRA tensors")
    needed = {"lora_A", "lora_B"} | ({_MAGNITUDE} if dora else set())
    for name, each in parts.items():
        if each.keys() != needed:
            raise ModelError(f"{path}: {name} has {', '.join(each)}, not {', '.join(needed)}")
        a, b = each["lora_A"].shape, each["lora_B"].shape
        if (len(a), len(b)) != (2, 2) or a[0] != b[1]:
            raise ModelError(f"{path}: {name} has A and B of mismatched shapes {a} and {b}")
    return parts


def _rank_and_scale(
    folder: Path, config: Mapping[str, Any], name: str, rows: int, *, stacked: bool = False
) -> tuple[int, float]:
    """Return the rank of a module or parameter, and the scale that PEFT gives the update.

    `rows` counts the rows of A: the rank, or with `stacked` experts a multiple of it. Raises
    ModelError.
    """
    try:
        rank = int(_by_pattern(config.get("rank_pattern"), name, config["r"]))
        alpha = float(_by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"]))
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        if not is_valid_scale(scale, rank):
            raise ValueError(f"lora_alpha {alpha} is out of range")
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder / CONFIG} has no valid r and lora_alpha: {one_line(error)}"
        ) from error
    if rank != rows and (rows % rank or not stacked):
        raise ModelError(
            f"{folder / CONFIG} gives rank {rank} for {name}, whose A has {rows} rows: "
            "config and adapter do not belong together"
        )
    return rank, scale


def _by_pattern(patterns: Any, name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module, else the default, as in PEFT.

    Raises ValueError for patterns other than plain names.
    """
    if patterns and not isinstance(patterns, Mapping):
        raise ValueError("rank_pattern or alpha_pattern is not an object")
    for pattern, value in (patterns or {}).items():
        if not _NAMES.fullmatch(pattern):
            raise ValueError(f"the pattern {pattern:.80} is not the name of a module")
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _check_padding(path: Path, updates: Sequence[WeightUpdate], rank: int) -> None:
    """Raise ModelError if an adapter would be too large when padded to one rank."""
    sizes = [update.a.nbytes + update.b.nbytes for update in updates]
    padded = sum(rank * size // each.rank for each, size in zip(updates, sizes, strict=True))
    if padded > max(_MAX_PADDED_BYTES, _MAX_PADDED_RATIO * sum(sizes)):
        lowest = min(update.rank for update in updates)
        raise ModelError(
            f"{path} has ranks from {lowest:,} to {rank:,}: padded to one rank, as mlx-lm needs, "
            f"the adapter would take {padded / 1e9:,.1f} GB: merge it into its base model with PEFT"
        )
