"""Checkpoint folders and other outputs: written beside their target, flushed, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxtune.errors import OutputError

# What mlx-lm looks for in an adapter folder.
ADAPTER = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
METADATA = "metadata.json"
METRICS = "metrics.jsonl"
LEDGER = "ledger.json"
PREVIOUS = "previous"


@contextmanager
def _as_output_error(target: Path, option: str = "path") -> Iterator[None]:
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"{target}: cannot be written: {error.strerror or error}: "
            f"free space, mend permissions or choose another {option}"
        ) from error


def write_file(target: Path, content: Iterable[bytes]) -> None:
    """Put a file in place whole or not at all; its content may come piece by piece.

    Raises OutputError, leaving what stood there before.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with _as_output_error(target):
        try:
            with temporary.open("wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
            _sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(target: Path, value: Any) -> None:
    """Put a JSON file in place whole or not at all. Raises OutputError."""
    write_file(target, [(json.dumps(value, indent=2, allow_nan=False) + "\n").encode()])


def write_checkpoint(
    target: Path, save: Callable[[Path], None], metadata: Mapping[str, Any]
) -> None:
    """Put a checkpoint folder in place: what `save` writes into it, and metadata.json.

    A folder of that name gives way only when the new one is complete.

    Raises OutputError.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    replaced = target.with_name(f".{target.name}.old")
    with _as_output_error(target):
        # What a killed process may have left.
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            save(temporary)
            write_json(temporary / METADATA, metadata)
            _sync_folder(temporary)
            # A folder that is not empty cannot be renamed over; the old one steps aside first.
            if target.exists():
                target.rename(replaced)
            temporary.rename(target)
            _sync_folder(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if target.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            elif replaced.exists():
                replaced.rename(target)


def _sync_folder(folder: Path) -> None:
    # A rename survives a power cut only once its folder is on the disk.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path, option: str) -> None:
    """Raise OutputError unless files can be made in the folder, or the folder itself can be made.

    Leaves nothing behind. `option` is what named the folder.
    """
    with _as_output_error(folder, option):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise OutputError(
                f"{folder}: cannot be written: {existing} is a file, not a folder: "
                f"choose another {option}"
            )
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".mlxtune-"):
            pass


def make_folder(folder: Path) -> None:
    """Make the folder and those above it where they are missing. Raises OutputError."""
    with _as_output_error(folder):
        folder.mkdir(parents=True, exist_ok=True)


def set_previous_aside(folder: Path) -> Path | None:
    """Move an earlier run's files into `previous/`, in place of what that held.

    Returns `previous/`, or None when the folder holds no run. Raises OutputError.
    """
    patterns = ("epoch-*", "step-*", "best", METRICS, LEDGER)
    earlier = sorted(path for pattern in patterns for path in folder.glob(pattern))
    if not earlier:
        return None
    previous = folder / PREVIOUS
    with _as_output_error(previous):
        if previous.exists():
            shutil.rmtree(previous)
        previous.mkdir()
        for path in earlier:
            path.rename(previous / path.name)
    return previous
