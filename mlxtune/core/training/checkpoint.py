"""Checkpoint folders: whole or not at all, checked before they are used, the recent ones kept.

    epoch-2/
      adapters.safetensors, adapter_config.json   what mlx-lm loads
      optimizer.safetensors                       what the backend needs to go on, and
      parameters.safetensors                      what it trains, where the adapter is not that
      metrics.jsonl                               every step, validation and epoch so far
      metadata.json                               how it came about: options, data, versions
      manifest.json                               size and SHA-256 of each file, written last

A folder without a manifest is no checkpoint.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxtune.core.machine.files import (
    as_output_error,
    file_hash,
    read_json,
    read_own,
    sync_folder,
    write_file,
    write_json,
)

# What mlx-lm looks for in an adapter folder.
ADAPTER = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
METADATA = "metadata.json"
METRICS = "metrics.jsonl"
MANIFEST = "manifest.json"
BEST = "best"
# Of the layout above; one that a program does not know, it does not read.
FORMAT = 1
_NUMBERED = ("epoch-*", "step-*")


class BadCheckpoint(Exception):
    """A folder that cannot be used as a checkpoint, and why."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are those that were written."""

    folder: Path
    metadata: Mapping[str, Any]

    @property
    def step(self) -> int:
        """How many steps had been taken."""
        return int(self.metadata["step"])

    def seconds(self, name: str) -> float:
        """Return a time of the metadata, which is in milliseconds there; 0 where it is missing."""
        value = self.metadata.get(name)
        return value / 1000 if isinstance(value, int | float) else 0.0

    @cached_property
    def metrics(self) -> bytes:
        """The content of its metrics.jsonl. Raises OSError or ValueError."""
        return read_own(self.folder / METRICS)


def write_checkpoint(
    target: Path,
    save: Callable[[Path], None],
    metadata: Mapping[str, Any],
    metrics: Iterable[bytes] = (),
) -> None:
    """Put a checkpoint folder in place: what `save` writes into it, metadata, metrics, manifest.

    A folder of that name gives way only when the new one is complete.

    Raises OutputError.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    replaced = _aside(target)
    with as_output_error(target, "--checkpoint-dir"):
        # What a killed process may have left.
        shutil.rmtree(temporary, ignore_errors=True)
        _put_back(target)
        shutil.rmtree(replaced, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            save(temporary)
            write_file(temporary / METRICS, metrics)
            write_json(temporary / METADATA, metadata)
            write_json(temporary / MANIFEST, _manifest(temporary))
            # A folder that is not empty cannot be renamed over; the old one steps aside first.
            if target.exists():
                target.rename(replaced)
            temporary.rename(target)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            _put_back(target)
            shutil.rmtree(replaced, ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _put_back(target: Path) -> None:
    if _aside(target).exists() and not target.exists():
        _aside(target).rename(target)


def _manifest(folder: Path) -> dict[str, Any]:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": file_hash(path)}
        for path in sorted(folder.iterdir())
    }
    return {"format": FORMAT, "files": files}


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return a checkpoint, having compared every file with its manifest.

    Raises BadCheckpoint with the reason, and FileNotFoundError where there is no manifest.
    """
    if folder.is_symlink():
        raise BadCheckpoint("it is a link to another folder")
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise BadCheckpoint(f"its format is {manifest.get('format')!r:.40}, not {FORMAT}")
        files = manifest.get("files")
        if not isinstance(files, dict) or not files.keys() >= {METADATA, METRICS, ADAPTER}:
            raise BadCheckpoint(f"its {MANIFEST} does not name its files")
        for name, said in files.items():
            _check_file(folder, name, said)
        metadata = read_json(folder / METADATA)
        if type(metadata.get("step")) is not int or metadata["step"] < 0:
            raise BadCheckpoint(f"its {METADATA} names no step")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise BadCheckpoint(str(error)) from error
    return Checkpoint(folder, metadata)


def _check_file(folder: Path, name: str, said: Any) -> None:
    if not isinstance(said, dict) or os.sep in name or name in ("", ".", ".."):
        raise BadCheckpoint(f"its {MANIFEST} does not name its files")
    path = folder / name
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise BadCheckpoint(f"{name} is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise BadCheckpoint(f"{name} is no regular file")
    if found.st_size != said.get("size"):
        raise BadCheckpoint(f"{name} has {found.st_size} bytes, not {said.get('size')!r:.40}")
    if file_hash(path) != said.get("sha256"):
        raise BadCheckpoint(f"{name} is not what was written: its SHA-256 differs")


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders in a run's folder that hold a manifest, whatever it says.

    One that a killed process had set aside to replace it is put back.
    """
    if not run.is_dir():
        return []
    _put_back(run / BEST)
    found = [path for pattern in (*_NUMBERED, BEST) for path in run.glob(pattern)]
    return sorted(path for path in found if os.path.lexists(path / MANIFEST))


def find_checkpoints(run: Path) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return the good checkpoints of a run, the newest first, and why others are none.

    Of two after the same step, the one of the epoch's end comes first.
    """
    good, bad = [], {}
    for folder in checkpoint_folders(run):
        try:
            good.append(read_checkpoint(folder))
        except (BadCheckpoint, FileNotFoundError) as problem:
            bad[folder] = str(problem)
    order = {"epoch": 2, BEST: 1, "step": 0}
    good.sort(key=lambda each: (each.step, order[each.folder.name.split("-")[0]]), reverse=True)
    return good, bad


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; killed halfway, what is left is none. What cannot be removed stays."""
    with suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
            return
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def prune(run: Path, keep: set[Path]) -> None:
    """Remove the numbered checkpoints of a run but these, and what killed processes left."""
    for path in (path for pattern in _NUMBERED for path in run.glob(pattern)):
        if path not in keep:
            remove_checkpoint(path)
    for name in (*_NUMBERED, BEST):
        for left in (*run.glob(f".{name}.tmp"), *run.glob(f".{name}.old")):
            # What was replaced, where the new one is there; what was never finished.
            if left.suffix == ".tmp" or (run / left.stem[1:]).exists():
                shutil.rmtree(left, ignore_errors=True)
    for left in run.glob(f".{METRICS}.*.tmp"):
        left.unlink(missing_ok=True)
