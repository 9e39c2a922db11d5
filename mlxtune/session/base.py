"""Finds the base model of an adapter, by an option or by the model's name in the adapter."""

import shlex
from contextlib import suppress
from pathlib import Path

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.models.model_folder import find_folder, is_local, read_config
from mlxtune.config import ImportConfig, OutgoingConfig, UseConfig
from mlxtune.core.files.remembered import is_own
from mlxtune.errors import ModelError


def adapter_of(config: UseConfig) -> AdapterFile | None:
    """Return the adapter that the options name, if they name one. Raises ModelError."""
    return None if config.adapter is None else AdapterFile.find(config.adapter)


def find_base(config: OutgoingConfig | UseConfig, adapter: AdapterFile) -> Path:
    """Return the base model's folder, from --model-path or else by the model's name in the adapter.

    The name may be a path relative to the folder in which the adapter's run was started.

    Raises ModelError.
    """
    return find_named(config, adapter, adapter.info.model, adapter.origin.working_directory)


def find_named(
    config: ImportConfig | OutgoingConfig | UseConfig,
    adapter: AdapterFile,
    named: str,
    relative_to: str,
) -> Path:
    """Return the base model's folder, from --model-path or else by the name `named`.

    The name may be a path relative to `relative_to`. A model is downloaded by this name only if
    this user made the adapter's run. The model's config is checked.

    Raises ModelError.
    """
    path = config.model_path or named
    if not path:
        raise ModelError(f"{adapter.path}: names no base model: give --model-path")
    with suppress(OSError, ValueError):  # not a folder name, or a folder we may not read
        if not config.model_path and relative_to and (Path(relative_to) / path).is_dir():
            path = str(Path(relative_to) / path)
    if not (config.model_path or is_local(path) or _is_own(adapter)):
        raise ModelError(
            f"{adapter.path}: its base model is not here, and you did not make the adapter on this "
            f"machine: to download the model, give --model-path {shlex.quote(path)}"
        )
    try:
        folder = find_folder(path)
    except ModelError as error:
        if config.model_path:
            raise
        why = str(error).removeprefix(f"{path}: ").removesuffix(": check --model-path")
        why = "is not there" if why == "no such folder" else f"cannot be used: {why}"
        raise ModelError(
            f"{adapter.path}: its base model {path} {why}: give --model-path"
        ) from error
    read_config(folder, trust_remote_code=config.trust_remote_code)
    return folder


def _is_own(adapter: AdapterFile) -> bool:
    """Return whether this user made the adapter's run."""
    return (run := adapter.origin.run) is not None and is_own(run)
