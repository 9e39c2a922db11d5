"""Finds the base model of an adapter, by an option or by the model's name in the adapter."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxtune.backend.adapters.files import AdapterInfo
from mlxtune.backend.models.model_folder import find_folder, is_local, read_config
from mlxtune.config import ImportConfig, UseConfig
from mlxtune.core.files.files import file_hash, read_json
from mlxtune.core.run.checkpoint import ADAPTER, METADATA
from mlxtune.core.run.own_runs import is_own
from mlxtune.errors import ModelError


def base_of(config: UseConfig, weights: Path, info: AdapterInfo) -> Path:
    """Return the folder of the base model that an adapter's config names. Raises ModelError."""
    metadata, run = metadata_of(weights)
    relative_to = str(metadata.get("working_directory") or "")
    return find_base(config, info.model, relative_to, str(weights), run)


def find_base(
    config: ImportConfig | UseConfig, named: str, relative_to: str, adapter: str, run: Path | None
) -> Path:
    """Return the base model's folder, from --model-path or else by the model's name in the adapter.

    The name may be a path relative to `relative_to`. A model is downloaded by this name only if
    this user made the adapter's `run`. The model's config is checked.

    Raises ModelError.
    """
    path = config.model_path or named
    if not path:
        raise ModelError(f"{adapter}: names no base model: give --model-path")
    with suppress(OSError, ValueError):  # not a folder name, or a folder we may not read
        if not config.model_path and relative_to and (Path(relative_to) / path).is_dir():
            path = str(Path(relative_to) / path)
    if not (config.model_path or is_local(path) or (run is not None and is_own(run))):
        raise ModelError(
            f"{adapter}: its base model is not here, and you did not make the adapter on this "
            f"machine: to download the model, give --model-path {shlex.quote(path)}"
        )
    try:
        folder = find_folder(path)
    except ModelError as error:
        if config.model_path:
            raise
        why = str(error).removeprefix(f"{path}: ").removesuffix(": check --model-path")
        why = "is not there" if why == "no such folder" else f"cannot be used: {why}"
        raise ModelError(f"{adapter}: its base model {path} {why}: give --model-path") from error
    read_config(folder, trust_remote_code=config.trust_remote_code)
    return folder


def metadata_of(weights: Path) -> tuple[Mapping[str, Any], Path | None]:
    """Return the metadata and the run folder of the checkpoint that has the adapter `weights`.

    The checkpoint is the adapter's own folder, or is in `checkpoints` next to the adapter. Without
    such a checkpoint, the metadata is empty and the folder None.
    """
    for folder in [weights.parent, *sorted(weights.parent.glob("checkpoints/*"))]:
        try:
            same = folder / ADAPTER == weights or (
                # Reading a pipe or device might never end.
                (folder / ADAPTER).is_file()
                and (folder / ADAPTER).stat().st_size == weights.stat().st_size
                and file_hash(folder / ADAPTER) == file_hash(weights)
            )
            if same and (folder / METADATA).is_file():
                return read_json(folder / METADATA), folder.parent
        except (OSError, ValueError):
            continue
    return {}, None
