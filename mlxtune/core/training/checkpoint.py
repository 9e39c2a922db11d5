"""Checkpoint folders: written completely or not at all, verified before use, and pruned.

`core/runs/run_files.py` lists their files. The manifest, with size and SHA-256 of each, is written
last: a folder without a manifest is not a checkpoint.
"""

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxtune.core.machine.files import file_hash, read_json, read_own, write_file, write_json
from mlxtune.core.machine.output_folder import put_back, replaced_folder

# The names mlx-lm expects in an adapter folder.
ADAPTER = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
METADATA = "metadata.json"
METRICS = "metrics.jsonl"
MANIFEST = "manifest.json"
BEST = "best"
# The version of the layout above; others are rejected.
FORMAT = 1
_NUMBERED = ("epoch-*", "step-*")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match its manifest."""

    folder: Path
    metadata: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return int(self.metadata["step"])

    def seconds(self, name: str) -> float:
        """Return a duration that the metadata has in milliseconds; 0 if it is missing."""
        value = self.metadata.get(name)
        return value / 1000 if isinstance(value, int | float) else 0.0

    @cached_property
    def metrics(self) -> bytes:
        """The content of metrics.jsonl. Raises OSError or ValueError."""
        return read_own(self.folder / METRICS)


def write_checkpoint(
    target: Path,
    save: Callable[[Path], None],
    metadata: Mapping[str, Any],
    metrics: Iterable[bytes] = (),
) -> None:
    """Write a checkpoint folder: the files of `save`, then metrics, metadata and manifest.

    An existing folder of that name is replaced only once the new one is complete.

    Raises OutputError.
    """
    with replaced_folder(target, "--checkpoint-dir", target.name) as folder:
        save(folder)
        write_file(folder / METRICS, metrics)
        write_json(folder / METADATA, metadata)
        write_json(folder / MANIFEST, _manifest(folder))


def _manifest(folder: Path) -> dict[str, Any]:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": file_hash(path)}
        for path in sorted(folder.iterdir())
    }
    return {"format": FORMAT, "files": files}


def _read_checkpoint(folder: Path) -> Checkpoint:
    """Return a checkpoint after comparing each file with the manifest.

    Raises ValueError, TypeError or OSError with the reason.
    """
    if folder.is_symlink():
        raise ValueError("it is a link to another folder")
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"its format is {manifest.get('format')!r:.40}, not {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files.keys() >= {METADATA, METRICS, ADAPTER}:
        raise ValueError(f"its {MANIFEST} does not name its files")
    for name, expected in files.items():
        _check_file(folder, name, expected)
    metadata = read_json(folder / METADATA)
    if type(metadata.get("step")) is not int or metadata["step"] < 0:
        raise ValueError(f"its {METADATA} names no step")
    return Checkpoint(folder, metadata)


def _check_file(folder: Path, name: str, expected: Any) -> None:
    if not isinstance(expected, dict) or os.sep in name or name in ("", ".", ".."):
        raise ValueError(f"its {MANIFEST} does not name its files")
    path = folder / name
    try:
        actual = path.lstat()
    except FileNotFoundError:
        raise ValueError(f"{name} is missing") from None
    if not stat.S_ISREG(actual.st_mode):
        raise ValueError(f"{name} is not a regular file")
    if actual.st_size != expected.get("size"):
        raise ValueError(f"{name} has {actual.st_size} bytes, not {expected.get('size')!r:.40}")
    if file_hash(path) != expected.get("sha256"):
        raise ValueError(f"{name} has changed: its SHA-256 differs from the manifest")


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of a run that have a manifest, valid or not.

    A process killed while replacing `best/` may have left it renamed; that is undone first.
    """
    if not run.is_dir():
        return []
    put_back(run / f".{BEST}.old", run / BEST)
    folders = [path for pattern in (*_NUMBERED, BEST) for path in run.glob(pattern)]
    return sorted(path for path in folders if os.path.lexists(path / MANIFEST))


def find_checkpoints(run: Path) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return the valid checkpoints of a run, the newest first, and why others are invalid.

    After the same step, `epoch-N` comes before `best` and `step-N`.
    """
    good, bad = [], {}
    for folder in checkpoint_folders(run):
        try:
            good.append(_read_checkpoint(folder))
        except (OSError, ValueError, TypeError) as problem:
            bad[folder] = str(problem)
    order = {"epoch": 2, BEST: 1, "step": 0}
    good.sort(key=lambda each: (each.step, order[each.folder.name.split("-")[0]]), reverse=True)
    return good, bad


def prune(run: Path, keep: set[Path]) -> None:
    """Remove a run's other numbered checkpoints, and leftovers of killed processes."""
    for path in (path for pattern in _NUMBERED for path in run.glob(pattern)):
        if path not in keep:
            _remove_checkpoint(path)
    for name in (*_NUMBERED, BEST):
        for left in (*run.glob(f".{name}.tmp"), *run.glob(f".{name}.old")):
            # A backup is removed only if its replacement is there.
            if left.suffix == ".tmp" or (run / left.stem[1:]).exists():
                shutil.rmtree(left, ignore_errors=True)
    for left in run.glob(f".{METRICS}.*.tmp"):
        left.unlink(missing_ok=True)


def _remove_checkpoint(folder: Path) -> None:
    # The manifest goes first: if the process is killed, the rest is not a checkpoint.
    with suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
            return
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
