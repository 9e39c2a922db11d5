"""An adapter as tensors by module, apart from any model: what every format is made of and gives."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import safetensors.numpy

from mlxtune.backend.adapters.adapter_files import read_adapter_config, read_said, read_shapes
from mlxtune.backend.adapters.adapter_state import in_order
from mlxtune.backend.model.dequantized import unpacked
from mlxtune.core.machine.files import write_file, write_json
from mlxtune.core.text import join_few
from mlxtune.core.training.checkpoint import ADAPTER, ADAPTER_CONFIG
from mlxtune.errors import ModelError, one_line

Matrix = npt.NDArray[np.float32]
_TENSOR = re.compile(r"(.+)\.(lora_a|lora_b|m)")
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Update:
    """The tensors of a module: float32 `a` (in, rank) and `b` (rank, out); `m` (out,) of DoRA.

    Of experts, `a` is (experts, rank, in) and `b` (experts, out, rank), as mlx-lm has them.
    """

    a: Matrix
    b: Matrix
    m: Matrix | None = None

    @property
    def of_experts(self) -> bool:
        """Tell whether it is that of a layer of experts."""
        return self.a.ndim == 3


@dataclass(frozen=True)
class Adapter:
    """An adapter, its modules by their path in mlx-lm's model.

    The update of a module is `scale * (x @ a) @ b`. `settings` are what adapter_config.json says
    beside that.
    """

    scale: float
    num_layers: int
    modules: Mapping[str, Update]
    dropout: float = 0.0
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_dora(self) -> bool:
        """Tell whether its modules have magnitudes."""
        return any(update.m is not None for update in self.modules.values())

    @property
    def rank(self) -> int:
        """The rank of its modules, which is the same for all."""
        update = next(iter(self.modules.values()))
        return update.a.shape[-2] if update.of_experts else update.a.shape[-1]

    def check_plain(self, what: str) -> None:
        """Raise ModelError for what most formats cannot hold. `what` names the format."""
        experts = [name for name, update in self.modules.items() if update.of_experts]
        if experts:
            raise ModelError(
                f"{what} has no place for the experts of a mixture ({join_few(experts, 2)}): "
                "use --format mlx-lm, or mlxtune fuse"
            )

    def write(self, folder: Path) -> None:
        """Write mlx-lm's adapter.safetensors and adapter_config.json. Raises OutputError."""
        tensors: dict[str, Matrix] = {}
        for name, update in self.modules.items():
            tensors |= {f"{name}.lora_a": update.a, f"{name}.lora_b": update.b}
            if update.m is not None:
                tensors[f"{name}.m"] = update.m
        write_tensors(folder / ADAPTER, tensors, {"format": "mlx"})
        config = {
            "fine_tune_type": "dora" if self.is_dora else "lora",
            "model": self.model,
            "num_layers": self.num_layers,
            "lora_parameters": {
                "rank": self.rank,
                "scale": self.scale,
                "dropout": self.dropout,
                "keys": sorted({place_in_layer(name)[1] for name in self.modules}),
            },
        }
        write_json(folder / ADAPTER_CONFIG, config | dict(self.settings))


def place_in_layer(name: str) -> tuple[int, str]:
    """Return the number of the layer that a module is in, and its path there.

    Raises ModelError for one that is in none, such as a head.
    """
    found = _IN_LAYER.search(name)
    if found is None:
        raise ModelError(f"{name}: is in no layer, where alone mlxtune puts LoRA")
    return int(found[1]), found[2]


def write_tensors(path: Path, tensors: Mapping[str, Matrix], metadata: dict[str, str]) -> None:
    """Write tensors in the order of their names, so that equal adapters are equal bytes.

    Raises OutputError.
    """
    arrays = {name: np.ascontiguousarray(value) for name, value in sorted(tensors.items())}
    write_file(path, [in_order(safetensors.numpy.save(arrays, metadata=metadata))])


def read_tensors(path: Path) -> dict[str, Matrix]:
    """Return the tensors of a safetensors file as float32. Raises ModelError."""
    # Which, unlike MLX, sees to it that the header is true.
    read_shapes(path)
    try:
        # Unlike numpy, MLX knows bfloat16.
        found: Any = mx.load(str(path), format="safetensors")
        tensors = {name: np.array(value.astype(mx.float32)) for name, value in found.items()}
    except Exception as error:
        raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    if broken := [name for name, value in tensors.items() if not np.isfinite(value).all()]:
        raise ModelError(f"{path}: has numbers that are not finite, in {join_few(broken)}")
    return tensors


def read_mlx_lm(weights: Path) -> Adapter:
    """Return an adapter in mlx-lm's layout. Raises ModelError."""
    config, place = read_adapter_config(weights), weights.with_name(ADAPTER_CONFIG)
    said = read_said(weights)
    try:
        dropout = float(config["lora_parameters"].get("dropout", 0.0))
        if not 0 <= dropout < 1:
            raise ValueError(f"a dropout of {dropout}")
        num_layers = int(config["num_layers"])
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{place}: does not say num_layers, rank and scale") from error
    return Adapter(
        scale=said.scale,
        num_layers=num_layers,
        modules=modules_of(weights, read_tensors(weights), dora=said.kind == "dora"),
        dropout=dropout,
        model=str(config.get("model") or ""),
        settings={"mlxtune": dict(said.own)} if _is_json(said.own) else {},
    )


def _is_json(value: Mapping[str, Any]) -> bool:
    """Tell whether there is anything, and all of it can be written again: no number is infinite."""
    try:
        return bool(value) and bool(json.dumps(dict(value), allow_nan=False))
    except (ValueError, RecursionError):
        return False


def modules_of(path: Path, tensors: Mapping[str, Matrix], *, dora: bool) -> dict[str, Update]:
    """Return the tensors of mlx-lm's names by module.

    Raises ModelError for what is no LoRA tensor, and for modules that lack one.
    """
    parts: dict[str, dict[str, Matrix]] = {}
    strangers = []
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            strangers.append(name)
        else:
            parts.setdefault(found[1], {})[found[2]] = tensor
    needed = {"lora_a", "lora_b", "m"} if dora else {"lora_a", "lora_b"}
    halves = [name for name, each in parts.items() if each.keys() != needed]
    if strangers or halves or not parts:
        what = f"tensors of no LoRA: {join_few(strangers)}" if strangers else "no whole LoRA"
        what = f"not all of {', '.join(sorted(needed))} for {join_few(halves)}" if halves else what
        raise ModelError(f"{path}: has {what}: it is no adapter in mlx-lm's layout")
    return {
        name: Update(each["lora_a"], each["lora_b"], each.get("m"))
        for name, each in sorted(parts.items())
    }


def plain_weight(module: nn.Module) -> mx.array:
    """Return the weight of a module in its floating dtype, or in float32 where it has none."""
    if "scales" not in module:
        return module.weight
    # nf4 unpacks itself; of the others, only those that a model computes with do.
    own = getattr(module, "unpacked", None)
    return own(mx.float32) if own is not None else unpacked(module, mx.float32)


def completed(adapter: Adapter, modules: Mapping[str, nn.Module]) -> Adapter:
    """Return an adapter that has, as mlx-lm wants it, the same projections in each of its layers.

    `modules` are the base model's projections by path. What is added changes nothing and, being
    zero throughout, does not learn either.

    Raises ModelError where the adapter does not fit them.
    """
    strangers = [name for name in adapter.modules if name not in modules]
    if strangers:
        raise ModelError(f"the base model has no {join_few(strangers)}, which the adapter is for")
    places = {name: place_in_layer(name) for name in modules}
    keys = {places[name][1] for name in adapter.modules}
    start = min(places[name][0] for name in adapter.modules)
    updates = {
        name: adapter.modules.get(name) or _nothing(adapter, modules[name])
        for name, (layer, inside) in places.items()
        if layer >= start and inside in keys
    }
    for name, update in updates.items():
        check_shapes(modules[name], update, name)
    layers = 1 + max(layer for layer, _ in places.values())
    return replace(adapter, modules=updates, num_layers=layers - start)


def _nothing(adapter: Adapter, module: nn.Module) -> Update:
    """Return an update that changes nothing."""
    weight = plain_weight(module)
    *experts, rows, columns = weight.shape
    a: tuple[int, ...] = (columns, adapter.rank)
    b: tuple[int, ...] = (adapter.rank, rows)
    if experts:
        a, b = (*experts, adapter.rank, columns), (*experts, rows, adapter.rank)
    m = np.array(mx.linalg.norm(weight.astype(mx.float32), axis=1)) if adapter.is_dora else None
    return Update(np.zeros(a, np.float32), np.zeros(b, np.float32), m)


def check_shapes(module: nn.Module, update: Update, name: str) -> None:
    """Raise ModelError where an update is for another shape than that of a projection."""
    *_, rows, columns = plain_weight(module).shape
    a, b = update.a.shape, update.b.shape
    rank, fits = (a[-2], (b[-2], a[-1])) if update.of_experts else (a[-1], (b[-1], a[0]))
    if fits != (rows, columns) or rank != (b[-1] if update.of_experts else b[0]):
        raise ModelError(f"{name}: the adapter is for {fits}, the model has {(rows, columns)}")
