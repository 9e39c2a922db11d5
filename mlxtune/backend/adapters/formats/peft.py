"""PEFT's adapter folder: adapter_model.safetensors and adapter_config.json, written and read.

PEFT has `lora_A.weight` (rank, in) and `lora_B.weight` (out, rank), where mlx-lm has `lora_a`
(in, rank) and `lora_b` (rank, out); the update is `lora_alpha / r * B A`, or over √r with rsLoRA.
Its `lora_magnitude_vector` (out,) is mlx-lm's `m`.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import regex

from mlxtune.backend.adapters.files import write_tensors
from mlxtune.backend.adapters.formats.adapter import (
    Adapter,
    Matrix,
    Update,
    layers_from,
    path_in_layer,
    read_tensors,
)
from mlxtune.backend.adapters.formats.names import (
    folder_names,
    match,
    shortest_targets,
    weighted_modules,
)
from mlxtune.core.machine.files import read_given_json, write_json
from mlxtune.core.text import join_few
from mlxtune.errors import ModelError, one_line

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_PART = re.compile(r"(.+?)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?")
# Of the patterns of rank_pattern and alpha_pattern, which may be such that no engine ever ends with
# them: the longest, the time for all of them, and how often something may be repeated.
_LONGEST_PATTERN, _PATTERN_SECONDS = 1000, 3.0
_MOST_COUNTS = 3
_COUNTS = re.compile(r"\{\d{1,2}(?:,\d{0,2})?\}")
# What modules of unequal rank may take when filled up, in all and beside what is in the file.
_FILLED_BYTES, _FILLED_TIMES = 256 * 2**20, 16
# What PEFT may put into an adapter that mlx-lm's LoRA has no place for.
_REFUSED = (
    *("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication"),
    *("lora_bias", "fan_in_fan_out", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)


def write_peft(adapter: Adapter, base: Path, folder: Path) -> None:
    """Write an adapter as PEFT's folder, with the names that the base model's folder has.

    Raises ModelError for what PEFT has no place for, and OutputError.
    """
    adapter.check_plain("PEFT's format")
    present = weighted_modules(folder_names(base))
    names = match(adapter.modules, present, str(base))
    tensors: dict[str, Matrix] = {}
    ranks: dict[str, int] = {}
    # What is zero throughout was put there because mlx-lm wants the same in every layer.
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
    targets, layers = shortest_targets(chosen, present)
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
            "lora_alpha": _number(adapter.scale * rank),
            "lora_dropout": adapter.dropout,
            "target_modules": targets,
            "layers_to_transform": layers,
            "rank_pattern": patterns,
            "alpha_pattern": {
                name: _number(adapter.scale * each) for name, each in patterns.items()
            },
            "use_dora": adapter.is_dora,
            "use_rslora": False,
            "bias": "none",
            "fan_in_fan_out": False,
            "modules_to_save": None,
        },
    )


def _rank_in_use(update: Update) -> int:
    """Return the rank without what it was padded with: zeros in `a` and in `b` alike."""
    used = np.flatnonzero(update.a.any(axis=0) | update.b.any(axis=1))
    return int(used[-1]) + 1 if len(used) else update.a.shape[1]


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def read_peft(folder: Path, modules: Iterable[str], num_layers: int) -> Adapter:
    """Return the adapter of a PEFT folder.

    `modules` are the paths of the base model's modules in mlx-lm, `num_layers` how many layers it
    has. Where ranks differ, all are padded with zeros to the largest; where scales differ, `b`
    takes the difference up.

    Raises ModelError, naming what mlx-lm's LoRA has no place for.
    """
    config, tensors = _read_config(folder / CONFIG), read_tensors(folder / WEIGHTS)
    parts = _parts_of(folder / WEIGHTS, tensors, dora=bool(config.get("use_dora")))
    names = match(parts, modules, "the base model")
    deadline = time.monotonic() + _PATTERN_SECONDS
    scales = {
        name: _scale(folder, config, name, each["lora_A"], deadline) for name, each in parts.items()
    }
    # That of most modules, which then stay as they are, bit for bit.
    scale = Counter(scales.values()).most_common(1)[0][0]
    rank = max(each["lora_A"].shape[0] for each in parts.values())
    _check_padding(folder / WEIGHTS, parts.values(), rank)
    updates = {
        names[name]: _update(each, rank, scales[name] / scale) for name, each in parts.items()
    }
    return Adapter(
        scale=scale,
        num_layers=layers_from(updates, num_layers),
        modules=updates,
        dropout=_dropout(folder, config),
        model=str(config.get("base_model_name_or_path") or ""),
    )


def base_of(folder: Path) -> str:
    """Return the name or path of the base model that a PEFT folder names; empty where none."""
    return str(_read_config(folder / CONFIG).get("base_model_name_or_path") or "")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_given_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: is missing: PEFT's weights need it beside them") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {config.get('peft_type')!r:.40}, not LORA")
    refused = [name for name in _REFUSED if config.get(name)]
    if config.get("bias", "none") != "none":
        refused.append("bias")
    if refused:
        raise ModelError(
            f"{path}: has {', '.join(refused)}, which mlx-lm's LoRA has no place for: "
            "merge it into its base model with PEFT's merge_and_unload instead"
        )
    return config


def _parts_of(
    path: Path, tensors: Mapping[str, Matrix], *, dora: bool
) -> dict[str, dict[str, Matrix]]:
    parts: dict[str, dict[str, Matrix]] = {}
    strangers = []
    for name, tensor in tensors.items():
        found = _PART.fullmatch(name.removeprefix(_PREFIX))
        if found is None:
            strangers.append(name)
        else:
            parts.setdefault(found[1], {})[found[2]] = tensor
    if strangers or not parts:
        what = f"tensors that mlx-lm's LoRA has no place for: {join_few(strangers)}"
        raise ModelError(f"{path}: has {what if strangers else 'no LoRA tensors'}")
    needed = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if dora else set())
    for name, each in parts.items():
        if each.keys() != needed:
            raise ModelError(f"{path}: {name} has {', '.join(each)}, not {', '.join(needed)}")
        shapes = [each["lora_A"].shape, each["lora_B"].shape]
        if any(len(shape) != 2 for shape in shapes) or shapes[0][0] != shapes[1][1]:
            raise ModelError(f"{path}: {name} has A and B of shapes {shapes[0]} and {shapes[1]}")
    return parts


def _scale(folder: Path, config: Mapping[str, Any], name: str, a: Matrix, deadline: float) -> float:
    """Return what multiplies the update of a module, as PEFT computes it.

    Raises ModelError, also where its patterns are not matched by the deadline.
    """
    rank = a.shape[0]
    try:
        said = int(_by_pattern(config.get("rank_pattern"), name, config["r"], deadline))
        default = config["lora_alpha"]
        alpha = float(_by_pattern(config.get("alpha_pattern"), name, default, deadline))
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        if not 0 < scale < math.inf:
            raise ValueError(f"lora_alpha {alpha} is none")
    except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError) as error:
        why = one_line(error)
        raise ModelError(f"{folder / CONFIG}: does not say r and lora_alpha: {why}") from error
    if said != rank:
        raise ModelError(
            f"{folder / CONFIG}: says rank {said} for {name}, whose tensors have {rank}"
        )
    return scale


def _by_pattern(patterns: Any, name: str, default: Any, deadline: float) -> Any:
    """Return the value of the first pattern that names a module, as PEFT's get_pattern_key does.

    Patterns are somebody's: one that is none, or takes too long, raises ValueError.
    """
    if patterns and not isinstance(patterns, Mapping):
        raise ValueError("its patterns are no object")
    for pattern, value in (patterns or {}).items():
        try:
            # Counted repeats are written out when it is compiled, those in each other many times.
            others, counts = _COUNTS.subn("", pattern)
            if len(pattern) > _LONGEST_PATTERN or counts > _MOST_COUNTS or "{" in others:
                raise ValueError(f"the pattern {pattern:.80} is too long, or repeats too much")
            # What PEFT, which knows fewer kinds, would not match either.
            whole = re.compile(rf"(.*\.)?({pattern})$").pattern
            left = max(deadline - time.monotonic(), 0.001)
            if regex.match(whole, name, timeout=left):
                return value
        except (re.error, regex.error) as error:
            raise ValueError(f"the pattern {pattern:.80} is none: {one_line(error)}") from error
        except TimeoutError as error:
            raise ValueError(f"the pattern {pattern:.80} takes too long to match") from error
    return default


def _dropout(folder: Path, config: Mapping[str, Any]) -> float:
    try:
        dropout = float(config.get("lora_dropout") or 0.0)
        if not 0 <= dropout < 1:
            raise ValueError(f"{dropout} is no share")
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / CONFIG}: lora_dropout is no number from 0 to 1") from error
    return dropout


def _check_padding(path: Path, parts: Iterable[Mapping[str, Matrix]], rank: int) -> None:
    """Raise ModelError where one rank for all would take many times what the file has."""
    pairs = [(each["lora_A"], each["lora_B"]) for each in parts]
    filled = sum(rank * (a.shape[1] + b.shape[0]) * 4 for a, b in pairs)
    if filled > max(_FILLED_BYTES, _FILLED_TIMES * sum(a.nbytes + b.nbytes for a, b in pairs)):
        lowest = min(a.shape[0] for a, _ in pairs)
        raise ModelError(
            f"{path}: has ranks from {lowest:,} to {rank:,}: of one rank, as mlx-lm wants it, it "
            f"would take {filled / 1e9:,.1f} GB: merge it into its base model with PEFT instead"
        )


def _update(parts: Mapping[str, Matrix], rank: int, factor: float) -> Update:
    a, b = parts["lora_A"].T, parts["lora_B"].T
    padding = rank - a.shape[1]
    return Update(
        a=np.pad(a, ((0, 0), (0, padding))),
        b=np.pad(b if factor == 1 else b * np.float32(factor), ((0, padding), (0, 0))),
        m=parts.get("lora_magnitude_vector"),
    )
