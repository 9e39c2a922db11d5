"""Adapters in mlx-lm's layout, ours and others': found, and what they say of themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import safetensors

from mlxtune.core.machine.files import read_given_json
from mlxtune.core.training.checkpoint import ADAPTER, ADAPTER_CONFIG, BEST
from mlxtune.errors import ModelError, one_line

LEAVES = {"lora": ("lora_a", "lora_b"), "dora": ("lora_a", "lora_b", "m")}
# Of a tensor: what is longer is none, and takes long to be taken apart.
_LONGEST_NAME = 1000
_IN_LAYER = re.compile(r"(?:.+\.)?layers\.([0-9]+)\.(.+)")


@dataclass(frozen=True)
class Said:
    """What adapter_config.json says. `own` is what only mlxtune writes there, empty of others."""

    kind: str
    rank: int
    scale: float
    num_layers: int | None
    own: Mapping[str, Any]


def find_adapter(path: str, option: str = "--adapter") -> Path:
    """Return the adapter file that a path means: the file, its folder, or a run's folder.

    Of a run without an adapter beside its checkpoints, it is that of the best checkpoint. `option`
    is what named it.

    Raises ModelError where there is none.
    """
    given = Path(os.path.expanduser(path))  # noqa: PTH111
    candidates = (
        *(given, given / ADAPTER, given / BEST / ADAPTER),
        given / "checkpoints" / BEST / ADAPTER,
    )
    try:
        found = next((each for each in candidates if each.is_file()), None)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}: check {option}") from error
    if found is None:
        raise ModelError(f"{path}: holds no {ADAPTER}: {option} takes an adapter or its folder")
    return found


def read_adapter_config(weights: Path) -> dict[str, Any]:
    """Return what adapter_config.json beside an adapter says, in mlx-lm's words.

    Raises ModelError.
    """
    path = weights.with_name(ADAPTER_CONFIG)
    try:
        return read_given_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: is missing: an adapter needs it beside its weights") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error


def read_said(weights: Path) -> Said:
    """Return what an adapter says of its kind, rank and scale. Raises ModelError."""
    config, path = read_adapter_config(weights), weights.with_name(ADAPTER_CONFIG)
    parameters = config.get("lora_parameters")
    # As mlx-lm reads it, which wrote none of it at first.
    kind = config.get("fine_tune_type", "lora")
    if not isinstance(kind, str) or kind not in LEAVES or not isinstance(parameters, Mapping):
        raise ModelError(f"{path}: is of no kind that mlxtune knows: fine_tune_type {kind!r:.40}")
    layers, own = config.get("num_layers"), config.get("mlxtune")
    try:
        rank, scale = int(parameters["rank"]), float(parameters["scale"])
        if not 0 < rank < 2**31 or not 0 < scale < float("inf"):
            raise ValueError(f"rank {rank:.6g} and scale {scale:.6g} are none")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{path}: does not say rank, scale and keys: {one_line(error)}") from error
    return Said(
        kind=kind,
        rank=rank,
        scale=scale,
        num_layers=layers if isinstance(layers, int) and layers > 0 else None,
        own=own if isinstance(own, Mapping) else {},
    )


def read_shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by their names. Raises ModelError."""
    try:
        with safetensors.safe_open(weights, framework="numpy") as file:
            if long := [name for name in file.keys() if len(name) > _LONGEST_NAME]:  # noqa: SIM118
                raise ValueError(f"a tensor's name has {len(long[0]):,} characters")
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, TypeError, ValueError) as error:
        raise ModelError(f"{weights}: cannot be read: {one_line(error)}") from error


def read_tensors(weights: Path) -> dict[str, mx.array]:
    """Return an adapter's tensors in float32, whatever dtype it has. Raises ModelError."""
    read_shapes(weights)
    try:
        loaded = mx.load(str(weights))
        assert isinstance(loaded, dict)
        tensors = {name: value.astype(mx.float32) for name, value in loaded.items()}
        mx.eval(tensors)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{weights}: cannot be read: {one_line(error)}") from error
    return tensors


def check_rank(weights: Path, shapes: Mapping[str, tuple[int, ...]], said: Said) -> None:
    """Raise ModelError where an adapter says another rank than its tensors have.

    It is compared before anything of that size is made.
    """
    for name, shape in shapes.items():
        if not name.endswith(".lora_a") or len(shape) not in (2, 3):
            continue
        # Of experts, (experts, rank, in).
        rank = shape[1]
        if rank != said.rank:
            raise ModelError(
                f"{weights.with_name(ADAPTER_CONFIG)}: says rank {said.rank}, but {name:.200} "
                f"has {rank:,}"
            )


def module_names(weights: Path, names: Mapping[str, Any], kind: str) -> list[str]:
    """Return the modules that an adapter's tensors are of, in order.

    Raises ModelError where a tensor is none of such an adapter.
    """
    leaves = LEAVES[kind]
    strange = sorted(name for name in names if name.rpartition(".")[2] not in leaves)
    if strange or not names:
        found = ", ".join(strange[:3]) or "nothing"
        raise ModelError(f"{weights}: is no adapter of type {kind}: it holds {found:.200}")
    return sorted({name.rpartition(".")[0] for name in names})


def in_layer(name: str) -> tuple[int, str] | None:
    """Return the number of the layer that a module is in, and its path there."""
    found = _IN_LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else None
