"""Data sets of the hub among the data of a command: fetched first, and pinned to a commit."""

from dataclasses import replace
from typing import Any, TypeVar

from mlxtune.config import DataConfig, EvalConfig
from mlxtune.core.text import count
from mlxtune.errors import DataError
from mlxtune.hub.datasets import fetch
from mlxtune.hub.names import dataset_name
from mlxtune.views.console import RunConsole

Config = TypeVar("Config", bound=DataConfig | EvalConfig)


def with_hub_data(config: Config, console: RunConsole) -> Config:
    """Return options whose data sets on the hub are here, and named with their commits.

    So a run that is resumed reads the same files. Raises DataError.
    """
    held_out = isinstance(config, EvalConfig)
    data = tuple(_pinned(each, config, console, held_out=held_out) for each in config.data)
    changes: dict[str, Any] = {"data": data} if data != config.data else {}
    if isinstance(config, DataConfig) and config.val_data is not None:
        name = dataset_name(config.val_data)
        if name is not None and name.split is None:
            raise DataError(f"--val-data {name}: name one of its splits, as {name}:validation")
        if name is not None:
            changes["val_data"] = _pinned(config.val_data, config, console)
    return replace(config, **changes) if changes else config


def _pinned(
    value: str, config: DataConfig | EvalConfig, console: RunConsole, *, held_out: bool = False
) -> str:
    """Return a value of --data as it is if it is a path, or else its name with the commit."""
    name = dataset_name(value)
    if name is None:
        return value
    data = fetch(name, held_out=held_out, quiet=config.quiet)
    files = count(sum(map(len, data.files.values())), "file")
    console.say(
        "Hub",
        f"{' and '.join(data.titles.values())}: {files}, commit {str(data.name.revision)[:10]}, "
        f"licence: {data.license or 'not stated'}",
    )
    return str(data.name)
