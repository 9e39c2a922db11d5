"""The base that an adapter was trained on: a folder as it is, or quantised while loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxtune.backend.adapters.adapter_files import read_said
from mlxtune.backend.model.loading import BaseModel, said_of
from mlxtune.backend.model.model_folder import read_config
from mlxtune.backend.model.quantize import FORMATS, NF4, already_quantized, name_of, parameters_of
from mlxtune.core.training.checkpoint import ADAPTER_CONFIG
from mlxtune.errors import ModelError


def trained_on(weights: Path, folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the keywords of `load_base` that make of a folder what an adapter was trained on.

    They are empty where that is the folder as it is: also where it is quantised already as the
    training quantised it, which `mlx_lm.convert` does. Raises ModelError where it is quantised
    otherwise.
    """
    own, place = read_said(weights).own, weights.with_name(ADAPTER_CONFIG)
    quantize, double = own.get("quantize"), own.get("double_quant", False)
    if quantize is None:
        return {}
    if quantize not in FORMATS or (double and quantize != NF4):
        raise ModelError(f"{place}: its base was quantised to {quantize!r:.40}, which is unknown")
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if not already_quantized(config):
        return {"quantize": quantize, "double_quant": bool(double)}
    if quantize == NF4 or not _is(config, parameters_of(quantize)):
        raise ModelError(
            f"{folder}: is quantised otherwise than to {quantize}, as the adapter was trained on: "
            "name the full-precision model"
        )
    return {}


def other_base(weights: Path, base: BaseModel, *, trust_remote_code: bool = False) -> str | None:
    """Say that an adapter was trained on another base than this one; None where it was not."""
    try:
        trained = trained_on(weights, base.folder, trust_remote_code=trust_remote_code)
    except ModelError as problem:
        return str(problem)
    if trained == said_of(base):
        return None
    on, remedy = "the base as it is", "leave out --quantize"
    if trained:
        on = f"the base quantised to {name_of(**trained)}"
        double = " --double-quant" * trained["double_quant"]
        remedy = f"give --quantize {trained['quantize']}{double}"
    return f"{weights}: was trained on {on}: {remedy} to go on with that"


def _is(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    said = config.get("quantization") or config.get("quantization_config")
    if not isinstance(said, Mapping):
        return False
    return {"mode": "affine", **{name: said.get(name) for name in wanted if name in said}} == wanted
