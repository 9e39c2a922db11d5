"""Finds, checks and writes the files of adapters; `AdapterFile` reads one."""

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import safetensors.numpy

from mlxtune.config.fields import as_path
from mlxtune.config.limits import ADAPTER_CONFIG_LIMITS
from mlxtune.core.files.hashing import base_change, is_fingerprint
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.files.tensor_files import TensorHeader, TensorInfo, read_header
from mlxtune.core.files.writing import write_file
from mlxtune.core.formatting import join_few
from mlxtune.core.run.checkpoint import ADAPTER, ADAPTER_CONFIG, BEST, find_checkpoints
from mlxtune.core.run.run_folder import is_unfinished
from mlxtune.errors import ModelError, OutputError, one_line, resume_command

# The metadata key of an adapter file whose value is the adapter's config.
OWN_CONFIG = "adapter_config"
LEAVES = {"lora": ("lora_a", "lora_b"), "dora": ("lora_a", "lora_b", "m")}
_LAYER_NAME = re.compile(r"(?:^|\.)layers\.([0-9]+)\.(.+)")
# The dtypes' names in a safetensors header, by MLX name.
_NAMES = {
    **{"float32": "F32", "bfloat16": "BF16", "float16": "F16"},
    **{"uint64": "U64", "uint32": "U32", "int32": "I32", "uint8": "U8"},
}
# Limits far beyond any real scale or alpha. Within them, products with float32 weights, and ratios
# of scales, are finite.
_MIN_SCALE, _MAX_ALPHA = 1e-8, 1e30
_READ_ERRORS = (OSError, RuntimeError, TypeError, ValueError)


def find_adapter(path: str, option: str = "--adapter") -> Path:
    """Return the adapter file for a path to the file itself, its folder or a run's folder.

    For a run without an adapter next to its checkpoints, return the best checkpoint's adapter.
    `option` is the command-line option that gave the path. Raises ModelError.
    """
    named = as_path(path)
    candidates = ("", ADAPTER, f"{BEST}/{ADAPTER}", f"checkpoints/{BEST}/{ADAPTER}")
    try:
        if file := next(
            (named / candidate for candidate in candidates if (named / candidate).is_file()), None
        ):
            return file
        problem = _no_adapter(named, option)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}: check {option}") from error
    raise ModelError(f"{path}: {problem}")


def _no_adapter(path: Path, option: str) -> str:
    """Return why there is no adapter file at a path, with a remedy."""
    if not path.exists():
        return f"no such file or folder: check {option}"
    if (path / "adapter_model.safetensors").is_file():
        command = f"mlxtune import {shlex.quote(str(path))} --output imported"
        return f"is a PEFT adapter: convert it with {command}"
    for run in (path, path / "checkpoints"):
        if checkpoint := find_checkpoints(run)[0]:
            named = f"{option} {shlex.quote(str(checkpoint[0].folder))}"
            if is_unfinished(run):
                resumed = resume_command(run)
                return f"the run has not finished: resume it with {resumed}, or use {named}"
            return f"has no {ADAPTER}: use {named}"
    return f"has no {ADAPTER}: {option} takes an adapter, its folder or a run's folder"


def check_replaceable(weights: Path) -> None:
    """Raise OutputError if writing an adapter and its config would replace another kind of file."""
    config = weights.with_name(ADAPTER_CONFIG)
    for path, is_ours in ((weights, _holds_adapter), (config, _describes_adapter)):
        ours = not os.path.lexists(path)
        with suppress(OSError, ValueError):
            ours = ours or is_ours(path)
        if not ours:
            raise OutputError(
                f"{path} is not part of an adapter, and would be replaced: move it away, or "
                "choose another --output"
            )


def check_known(weights: Path, kept: Iterable[Path]) -> None:
    """Raise OutputError if replacing an adapter would lose it.

    It would, unless a file in `kept` has the adapter's bytes. A config with no adapter beside it
    counts as an adapter of another format, unless mlxtune wrote the config.
    """
    path, is_ours = weights, False
    if os.path.lexists(weights):
        digest = _hash_of(weights)
        is_ours = digest is not None and any(_hash_of(each) == digest for each in kept)
    elif os.path.lexists(path := weights.with_name(ADAPTER_CONFIG)):
        with suppress(OSError, ValueError):
            is_ours = "mlxtune" in read_json(path, ADAPTER_CONFIG_LIMITS)
    else:
        return
    if not is_ours:
        raise OutputError(
            f"{path} is in no checkpoint of a run in this folder, and would be lost: choose "
            "another --output, or replace the file with --overwrite"
        )


def _hash_of(path: Path) -> str | None:
    """Return a file's hash; None if the file cannot be read."""
    with suppress(OSError):
        return file_hash(path)
    return None


def check_beside(weights: Path, described: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raise OutputError if another adapter in the folder of `weights` would lose its config.

    The folder's config counts as another adapter's if it lacks an entry of `described`, or names a
    base model with a fingerprint other than `base`.
    """
    try:
        config = read_json(weights.with_name(ADAPTER_CONFIG), ADAPTER_CONFIG_LIMITS)
    except (OSError, ValueError):
        return
    mark = config.get("mlxtune")
    there = mark.get("base", base) if isinstance(mark, Mapping) else base
    others = (path for path in weights.parent.glob("*.safetensors") if path != weights)
    same_base = there == base or (is_fingerprint(there) and base_change(there, base) is None)
    same = same_base and _has_entries(config, described)
    if same or not any(map(_holds_adapter, others)):
        return
    folder = weights.with_suffix("") / ADAPTER
    raise OutputError(
        f"{weights}: the folder has another adapter's {ADAPTER_CONFIG}, with other options or "
        "another base model, and mlx-lm reads one config for each folder: give this adapter a "
        f"folder of its own: --output {folder}"
    )


def _has_entries(config: Mapping[str, Any], described: Mapping[str, Any]) -> bool:
    """Return whether a config has all entries of `described`, nested entries included."""
    for name, value in described.items():
        recorded = config.get(name)
        if isinstance(value, Mapping):
            if not isinstance(recorded, Mapping) or not _has_entries(recorded, value):
                return False
        elif recorded != value:
            return False
    return True


def _holds_adapter(path: Path) -> bool:
    return any(".lora_" in name for name in read_header(path).tensors)


def _describes_adapter(path: Path) -> bool:
    config = read_json(Path(os.path.realpath(path)), ADAPTER_CONFIG_LIMITS)
    return not config.keys().isdisjoint({"fine_tune_type", "lora_parameters", "peft_type"})


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Parse adapter_config.json as written by mlx-lm or PEFT. Raises ModelError."""
    try:
        # The file may be a link: Hugging Face's cache consists of links.
        return read_json(Path(os.path.realpath(path)), ADAPTER_CONFIG_LIMITS)
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: copy it from the folder where the adapter was trained"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error


def is_valid_scale(scale: float, rank: int) -> bool:
    """Return whether a scale, and the alpha that it implies, are in the supported range."""
    return scale > _MIN_SCALE and scale * rank < _MAX_ALPHA


def valid_dropout(path: Path, option: str, value: Any) -> float:
    """Return the dropout in an adapter's config. Raises ModelError if the value is invalid."""
    try:
        dropout = float(value or 0.0)
        if not 0 <= dropout < 1:
            raise ValueError
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {option} must be at least 0 and below 1") from error
    return dropout


def tensor_header(path: Path) -> TensorHeader:
    """Return the checked header of a safetensors file. Raises ModelError."""
    try:
        return read_header(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error


def load_tensors(
    path: Path, expected: Mapping[str, Any] | None = None
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return a safetensors file's tensors and its metadata.

    The header, which MLX does not check, is checked before any data is read. The tensors must have
    the names, shapes and dtypes of the `expected` MLX or numpy arrays. Raises ModelError.
    """
    header = tensor_header(path)
    if expected is not None:
        check_shapes(path, header.tensors, expected)
        dtypes = {name: _NAMES[str(value.dtype).split(".")[-1]] for name, value in expected.items()}
        others = [
            f"{name} is {header.tensors[name].dtype}, not {dtype}"
            for name, dtype in sorted(dtypes.items())
            if header.tensors[name].dtype != dtype
        ]
        if others:
            raise ModelError(f"{path} has dtypes that no run writes: {join_few(others, 3)}")
    return read_arrays(path)


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file whose header has been checked.

    Raises ModelError.
    """
    try:
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        mx.eval(loaded[0])
    except _READ_ERRORS as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    return loaded


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write MLX or numpy arrays as a safetensors file. Raises OutputError."""
    write_file(path, [tensor_bytes(tensors, metadata)])


def tensor_bytes(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a safetensors file of MLX or numpy arrays.

    Arrays are sorted by name, so that equal tensors give equal bytes.
    """
    arrays = {name: np.array(value, order="C") for name, value in sorted(tensors.items())}
    return _sort_metadata(safetensors.numpy.save(arrays, metadata=dict(metadata)))


def _sort_metadata(content: bytes) -> bytes:
    """Return a safetensors file with its metadata sorted by name.

    The safetensors library writes metadata in a different order in each process. The order of the
    tensors, which does matter, is kept.
    """
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Like the library, pad the header so that the tensors start at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def check_shapes(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, Any],
    base: str | None = "",
) -> None:
    """Raise ModelError if names or shapes differ from those in `expected`.

    `base` is the name of the model that an adapter was trained on, for the message; None if that
    model has the same layout.
    """
    shapes, needed = (
        {name: tuple(value.shape) for name, value in each.items()} for each in (tensors, expected)
    )
    problems = [
        f"{name} is {shapes.get(name, 'missing')}, but the model needs {needed.get(name, 'none')}"
        for name in sorted(needed.keys() | shapes.keys())
        if needed.get(name) != shapes.get(name)
    ]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise other_base_error(path, base, f"{problems[0]:.300}{more}")


def other_base_error(path: Path, base: str | None, problem: str) -> ModelError:
    """Return the error for an adapter that was trained on a different model, or is damaged."""
    if base is None:
        return ModelError(
            f"{path} is damaged: {problem}: copy it from the folder where it was trained"
        )
    origin = f"was trained on another model, {base:.200}, and " if base else ""
    return ModelError(
        f"{path}: {origin}does not fit the model: {problem}: name the right base with --model-path"
    )


def layer_and_path(name: str) -> tuple[int, str] | None:
    """Return a module's layer number and its path in the layer; None outside the layers."""
    match = _LAYER_NAME.search(name)
    return (int(match[1]), match[2]) if match else None


def paths_in_layers(names: Iterable[str]) -> list[str]:
    """Return the paths of modules in their layers, sorted, without modules outside the layers."""
    return sorted({pair[1] for pair in map(layer_and_path, names) if pair is not None})
