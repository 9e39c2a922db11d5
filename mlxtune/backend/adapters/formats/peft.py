"""PEFT's adapter folder: adapter_model.safetensors and adapter_config.json, written and read.

PEFT's `lora_A.weight` (rank, in) and `lora_B.weight` (out, rank) are the transposes of mlx-lm's
`lora_a` and `lora_b`, and its `lora_magnitude_vector` (out,) is `m`. The update is
`lora_alpha / r * B A`, with √r in place of r for rsLoRA.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import regex

from mlxtune.backend.adapters.files import (
    read_adapter_config,
    read_tensors,
    valid_dropout,
    write_tensors,
)
from mlxtune.backend.adapters.formats.adapter import (
    Adapter,
    Matrix,
    Update,
    path_in_layer,
)
from mlxtune.backend.model.model_folder import NOT_TEXT, weight_names
from mlxtune.core.machine.files import write_json
from mlxtune.core.text import join_few
from mlxtune.errors import ModelError, one_line

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
CONFIG = "adapter_config.json"
# From the layer number on, a module has the same name in all libraries.
_TAIL = re.compile(r"(?:^|\.)(layers\.\d+\..+)$")
_PREFIX = "base_model.model."
_PART = re.compile(r"(.+?)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?")
# rank_pattern and alpha_pattern hold regular expressions by strangers, some of which never finish
# matching: limits of their length, of the time for all, and of counted repeats.
_LONGEST_PATTERN, _PATTERN_SECONDS = 1000, 3.0
_MOST_COUNTS = 3
_COUNTS = re.compile(r"\{\d{1,2}(?:,\d{0,2})?\}")
# Limits of padding unequal ranks: in bytes, and as a multiple of the file's size.
_PADDED_BYTES, _PADDED_TIMES = 256 * 2**20, 16
# Features of PEFT's adapters that mlx-lm's LoRA does not have.
_REFUSED = (
    *("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication"),
    *("lora_bias", "fan_in_fan_out", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)


def write_peft(adapter: Adapter, base: Path, folder: Path) -> None:
    """Write an adapter as PEFT's folder, with the module names of the base model's folder.

    Raises ModelError for what PEFT cannot hold, and OutputError.
    """
    adapter.check_plain("PEFT's format", dora=True)
    present = _modules_in(base)
    names = _match(adapter.modules, present, str(base))
    tensors: dict[str, Matrix] = {}
    ranks: dict[str, int] = {}
    # Modules that are zero throughout are padding: mlx-lm needs the same modules in every layer.
    modules = {path: each for path, each in adapter.modules.items() if each.a.any() or each.b.any()}
    for path, update in (modules or adapter.modules).items():
        rank, name = _rank_in_use(update), f"{_PREFIX}{names[path]}"
        ranks[names[path]] = rank
        tensors[f"{name}.lora_A.weight"] = update.a[:, :rank].T
        tensors[f"{name}.lora_B.weight"] = update.b[:rank].T
        if update.m is not None:
            tensors[f"{name}.lora_magnitude_vector"] = update.m
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    chosen = {names[path]: path_in_layer(path) for path in modules or adapter.modules}
    targets, layers = _shortest_targets(chosen, present)
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
            "rank_pattern": patterns,
            "alpha_pattern": {name: adapter.scale * each for name, each in patterns.items()},
            "use_dora": adapter.is_dora,
            "use_rslora": False,
            "bias": "none",
            "fan_in_fan_out": False,
            "modules_to_save": None,
        },
    )


def _rank_in_use(update: Update) -> int:
    """Return the rank without padding, which is zero in both `a` and `b`."""
    used = np.flatnonzero(update.a.any(axis=0) | update.b.any(axis=1))
    return int(used[-1]) + 1 if len(used) else update.a.shape[1]


def read_peft(folder: Path, modules: Iterable[str]) -> Adapter:
    """Return the adapter of a PEFT folder for a base model with these modules.

    Lower ranks are padded with zeros to the largest, and `b` makes up for differing scales. Raises
    ModelError, naming the features that mlx-lm's LoRA does not have.
    """
    config = _read_config(folder / CONFIG)
    parts = _read_parts(folder / WEIGHTS, dora=bool(config.get("use_dora")))
    names = _match(parts, modules, "the base model")
    deadline = time.monotonic() + _PATTERN_SECONDS
    scales = {
        name: _scale(folder, config, name, each["lora_A"], deadline) for name, each in parts.items()
    }
    # The most common one, so that most modules stay the same bit for bit.
    scale = Counter(scales.values()).most_common(1)[0][0]
    rank = max(each["lora_A"].shape[0] for each in parts.values())
    _check_padding(folder / WEIGHTS, parts.values(), rank)
    updates = {
        names[name]: _update(each, rank, scales[name] / scale) for name, each in parts.items()
    }
    return Adapter(
        scale=scale,
        modules=updates,
        dropout=valid_dropout(folder / CONFIG, "lora_dropout", config.get("lora_dropout")),
        model=str(config.get("base_model_name_or_path") or ""),
    )


def _modules_in(folder: Path) -> set[str]:
    """Return the modules with a weight in a model folder, without reading it. Raises ModelError."""
    names = weight_names(folder)
    return {name.removesuffix(".weight") for name in names if name.endswith(".weight")}


def _match(wanted: Iterable[str], present: Iterable[str], where: str) -> dict[str, str]:
    """Return the names in `present` of the wanted modules, which are named by another tool.

    Names that differ are matched from the layer number on. Raises ModelError for modules that are
    missing from `present`, or in it twice; `where` is what it lists.
    """
    present = set(present)
    by_tail: dict[str, list[str]] = {}
    for name in present:
        if (tail := _TAIL.search(name)) and not NOT_TEXT.search(name):
            by_tail.setdefault(tail[1], []).append(name)
    matches, missing = {}, []
    for name in wanted:
        tail = _TAIL.search(name)
        others = by_tail.get(tail[1], []) if tail else []
        if name in present:
            matches[name] = name
        elif len(others) == 1:
            matches[name] = others[0]
        else:
            missing.append(name)
    if missing:
        raise ModelError(f"{where}: does not have exactly one module for {join_few(missing)}")
    return matches


def _shortest_targets(
    chosen: Mapping[str, tuple[int, str]], present: Iterable[str]
) -> tuple[list[str], list[int] | None]:
    """Return PEFT's target_modules and layers_to_transform for exactly the chosen modules.

    `chosen` gives the layer of each module and the path in it; `present` are all modules. Full
    names are returned where last names would match other modules too.
    """
    layers = sorted({layer for layer, _ in chosen.values()})
    last_names = sorted({path.rsplit(".", 1)[-1] for _, path in chosen.values()})
    named = {name for name in present if name.rsplit(".", 1)[-1] in last_names}
    if named == set(chosen):
        return last_names, None
    # PEFT takes the first number in a module's name for that of its layer.
    numbers = {name: re.search(r"\.[^.]*\.(\d+)\.", name) for name in named}
    if {name for name, each in numbers.items() if each and int(each[1]) in layers} == set(chosen):
        return last_names, layers
    return sorted(chosen), None


def base_of(folder: Path) -> str:
    """Return the name or path of the base model in a PEFT folder's config, or an empty string."""
    return str(_read_config(folder / CONFIG).get("base_model_name_or_path") or "")


def _read_config(path: Path) -> dict[str, Any]:
    config = read_adapter_config(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{path}: peft_type is {config.get('peft_type')!r:.40}: only LORA is supported"
        )
    refused = [name for name in _REFUSED if config.get(name)]
    if config.get("bias", "none") != "none":
        refused.append("bias")
    if refused:
        raise ModelError(
            f"{path}: has {', '.join(refused)}, which mlx-lm's LoRA does not support: "
            "merge the adapter into its base model with PEFT's merge_and_unload instead"
        )
    return config


def _read_parts(path: Path, *, dora: bool) -> dict[str, dict[str, Matrix]]:
    """Return tensors by module and part, such as `lora_A`."""
    parts: dict[str, dict[str, Matrix]] = {}
    others = []
    for name, tensor in read_tensors(path).items():
        if match := _PART.fullmatch(name.removeprefix(_PREFIX)):
            parts.setdefault(match[1], {})[match[2]] = np.array(tensor)
        else:
            others.append(name)
    if others:
        raise ModelError(
            f"{path}: has tensors that mlx-lm's LoRA does not support: {join_few(others)}"
        )
    if not parts:
        raise ModelError(f"{path}: has no LoRA tensors")
    needed = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if dora else set())
    for name, each in parts.items():
        if each.keys() != needed:
            raise ModelError(f"{path}: {name} has {', '.join(each)}, not {', '.join(needed)}")
        shapes = [each["lora_A"].shape, each["lora_B"].shape]
        if any(len(shape) != 2 for shape in shapes) or shapes[0][0] != shapes[1][1]:
            raise ModelError(f"{path}: {name} has A and B of shapes {shapes[0]} and {shapes[1]}")
    return parts


def _scale(folder: Path, config: Mapping[str, Any], name: str, a: Matrix, deadline: float) -> float:
    """Return the scale of a module's update as PEFT computes it.

    Raises ModelError, also if matching the patterns takes too long.
    """
    rank = a.shape[0]
    try:
        config_rank = int(_by_pattern(config.get("rank_pattern"), name, config["r"], deadline))
        default = config["lora_alpha"]
        alpha = float(_by_pattern(config.get("alpha_pattern"), name, default, deadline))
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        if not 0 < scale < math.inf:
            raise ValueError(f"lora_alpha {alpha} is out of range")
    except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{folder / CONFIG}: has no valid r and lora_alpha: {one_line(error)}"
        ) from error
    if config_rank != rank:
        raise ModelError(
            f"{folder / CONFIG}: gives rank {config_rank} for {name}, whose tensors have {rank}: "
            "the two files do not belong together"
        )
    return scale


def _by_pattern(patterns: Any, name: str, default: Any, deadline: float) -> Any:
    """Return the value of the first pattern that matches a module, as PEFT's get_pattern_key does.

    Raises ValueError for a pattern that is invalid or takes too long.
    """
    if patterns and not isinstance(patterns, Mapping):
        raise ValueError("its patterns are not an object")
    for pattern, value in (patterns or {}).items():
        try:
            # Compiling expands counted repeats; nested ones multiply.
            others, counts = _COUNTS.subn("", pattern)
            if len(pattern) > _LONGEST_PATTERN or counts > _MOST_COUNTS or "{" in others:
                raise ValueError(f"the pattern {pattern:.80} is too long, or repeats too much")
            # `re` first: PEFT rejects what only `regex` accepts.
            whole = re.compile(rf"(.*\.)?({pattern})$").pattern
            left = max(deadline - time.monotonic(), 0.001)
            if regex.match(whole, name, timeout=left):
                return value
        except (re.error, regex.error) as error:
            raise ValueError(f"the pattern {pattern:.80} is invalid: {one_line(error)}") from error
        except TimeoutError as error:
            raise ValueError(f"the pattern {pattern:.80} takes too long to match") from error
    return default


def _check_padding(path: Path, parts: Iterable[Mapping[str, Matrix]], rank: int) -> None:
    """Raise ModelError if padding to one rank would take many times the file's size."""
    pairs = [(each["lora_A"], each["lora_B"]) for each in parts]
    padded = sum(rank * (a.shape[1] + b.shape[0]) * 4 for a, b in pairs)
    if padded > max(_PADDED_BYTES, _PADDED_TIMES * sum(a.nbytes + b.nbytes for a, b in pairs)):
        lowest = min(a.shape[0] for a, _ in pairs)
        raise ModelError(
            f"{path}: has ranks from {lowest:,} to {rank:,}: padded to one rank, as mlx-lm needs, "
            f"it would take {padded / 1e9:,.1f} GB: merge it into its base model with PEFT instead"
        )


def _update(parts: Mapping[str, Matrix], rank: int, factor: float) -> Update:
    a, b = parts["lora_A"].T, parts["lora_B"].T
    padding = rank - a.shape[1]
    return Update(
        a=np.pad(a, ((0, 0), (0, padding))),
        b=np.pad(b if factor == 1 else b * np.float32(factor), ((0, padding), (0, 0))),
        m=parts.get("lora_magnitude_vector"),
    )
