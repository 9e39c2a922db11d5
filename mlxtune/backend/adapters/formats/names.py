"""Module names: mlx-lm's, and those of Hugging Face in the base model's files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import mlx.nn as nn
import safetensors

from mlxtune.backend.lora.targets import projections
from mlxtune.core.text import join_few
from mlxtune.errors import ModelError, one_line

# From the layer number on, a module has the same name in all libraries.
_TAIL = re.compile(r"(?:^|\.)(layers\.\d+\..+)$")
# Encoders of images and sound have layers too.
_NOT_TEXT = re.compile(r"vision|visual|audio|speech|image")


def modules_in(folder: Path) -> set[str]:
    """Return the modules with a weight in a model folder, without reading it. Raises ModelError."""
    names: set[str] = set()
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                names.update(file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    return {name.removesuffix(".weight") for name in names if name.endswith(".weight")}


def projections_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the projections in a model's layers by their path in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        names[id(module)]: module
        for layer in model.layers
        for module in projections(layer).values()
    }


def match(wanted: Iterable[str], present: Iterable[str], where: str) -> dict[str, str]:
    """Return the names in `present` of the wanted modules, which are named by another tool.

    Names that differ are matched from the layer number on. Raises ModelError for modules that are
    missing from `present`, or in it twice; `where` is what it lists.
    """
    present = set(present)
    by_tail: dict[str, list[str]] = {}
    for name in present:
        if (tail := _TAIL.search(name)) and not _NOT_TEXT.search(name):
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


def shortest_targets(
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
    in_layers = {
        name
        for name in named
        if (number := re.search(r"\.[^.]*\.(\d+)\.", name)) and int(number[1]) in layers
    }
    if in_layers == set(chosen):
        return last_names, layers
    return sorted(chosen), None
