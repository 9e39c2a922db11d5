"""Checkpoint folders: written atomically, verified before use, and pruned.

The manifest, with the size and SHA-256 of each file, is written last: a folder without a manifest
is not a checkpoint.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxtune.config.limits import MANIFEST_LIMITS
from mlxtune.core.files.lock import check_not_moved
from mlxtune.core.files.ours import discard, is_folder, move, others_in, remove_file, remove_folder
from mlxtune.core.files.output_folder import put_back, replaced_folder
from mlxtune.core.files.reading import check_stored, file_hash, read_json, read_own
from mlxtune.core.files.writing import (
    as_output_error,
    beside,
    is_temporary,
    write_file,
    write_json,
)
from mlxtune.core.names import is_file_name

# The file names that mlx-lm expects in an adapter folder.
ADAPTER = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
# The file of the trained tensors, written if the adapter file has them padded or converted.
PARAMETERS = "parameters.safetensors"
METADATA = "metadata.json"
METRICS = "metrics.jsonl"
MANIFEST = "manifest.json"
BEST = "best"
# The metadata entry with the SHA-256 of the adapter from which the run started.
INITIAL_HASH = "init_adapter_hash"
# The metadata entry with the SHA-256 of the files that the run wrote before its first step.
FILE_HASHES = "records"
# The metadata entry of the size and the SHA-256 of the record of samples up to the checkpoint.
WRITTEN_SAMPLES = "samples"
# The metadata entries, other than options, that decide the result: a resumed run must have its
# checkpoint's values, and all workers of a run the same.
FACTS = (
    *("data_hash", "validation_hash", "reward_hash"),
    *("base_hash", "dtype", "quantized_compute"),
)
# The version of this layout; checkpoints of other versions are rejected.
FORMAT = 1
_NUMBERED_NAME = re.compile("(epoch|step)-[0-9]+")
_REQUIRED_FILES = {ADAPTER, METADATA, METRICS, MANIFEST}
_FILES = _REQUIRED_FILES | {ADAPTER_CONFIG, OPTIMIZER, PARAMETERS}


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step within an epoch."""
    return f"step-{step}"


def epoch_name(epoch: int) -> str:
    """Return the name of the checkpoint at the end of an epoch."""
    return f"epoch-{epoch}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match its manifest."""

    folder: Path
    metadata: Mapping[str, Any]

    @property
    def run(self) -> Path:
        """The folder of the run, which holds its checkpoints and records."""
        return self.folder.parent

    @property
    def step(self) -> int:
        return int(self.metadata["step"])

    def seconds(self, name: str) -> float:
        """Return, in seconds, a duration that is stored in milliseconds; 0 if it is missing."""
        value = self.metadata.get(name)
        return value / 1000 if isinstance(value, int | float) else 0.0

    @cached_property
    def metrics(self) -> bytes:
        """The content of metrics.jsonl. Raises OSError or ValueError."""
        return read_own(self.folder / METRICS)


def write_checkpoint(
    target: Path,
    snapshot: Callable[[Path], None],
    metadata: Mapping[str, Any],
    metrics: Iterable[bytes] = (),
) -> None:
    """Write a checkpoint folder: the files of a snapshot, metrics, metadata and a manifest.

    An existing checkpoint of the same name is replaced only once the new one is complete.

    Raises OutputError if writing fails, or if a folder of that name is not a checkpoint.
    """
    aside = target.with_name(f".{target.name}.old")
    with replaced_folder(target, "--checkpoint-dir", aside, is_checkpoint) as folder:
        snapshot(folder)
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
    manifest = read_json(folder / MANIFEST, MANIFEST_LIMITS)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"its format is {manifest.get('format')!r:.40}, not {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files.keys() >= {METADATA, METRICS, ADAPTER}:
        raise ValueError(f"its {MANIFEST} does not list its files")
    for name, expected in files.items():
        _check_file(folder, name, expected)
    metadata = read_json(folder / METADATA)
    if type(metadata.get("step")) is not int or metadata["step"] < 0:
        raise ValueError(f"its {METADATA} names no step")
    return Checkpoint(folder, metadata)


def _check_file(folder: Path, name: str, expected: Any) -> None:
    if not isinstance(expected, dict) or not is_file_name(name):
        raise ValueError(f"its {MANIFEST} does not list its files")
    path = folder / name
    try:
        actual = path.lstat()
    except FileNotFoundError:
        raise ValueError(f"{name} is missing") from None
    if not stat.S_ISREG(actual.st_mode):
        raise ValueError(f"{name} is not a regular file")
    if actual.st_size != expected.get("size"):
        raise ValueError(f"{name} has {actual.st_size} bytes, not {expected.get('size')!r:.40}")
    check_stored(path)
    if file_hash(path) != expected.get("sha256"):
        raise ValueError(f"{name} has changed: its SHA-256 differs from the manifest")


def is_named_checkpoint(path: Path) -> bool:
    return path.name == BEST or _NUMBERED_NAME.fullmatch(path.name) is not None


def is_checkpoint(folder: Path) -> bool:
    """Return whether mlxtune wrote a folder as a checkpoint, valid or not.

    Such a folder has a manifest, which may be damaged, and only files that a checkpoint may have.
    """
    try:
        if not is_folder(folder):
            return False
        try:
            files = read_json(folder / MANIFEST, MANIFEST_LIMITS).get("files")
        except ValueError:
            files = dict.fromkeys(_REQUIRED_FILES)  # their sizes and hashes are lost
            if not all(os.path.lexists(folder / name) for name in _REQUIRED_FILES):
                return False
        if not isinstance(files, dict) or ADAPTER not in files:
            return False
        return not others_in(folder, lambda name: name in _FILES or _is_listed(folder, files, name))
    except OSError:
        return False


def _is_listed(folder: Path, files: Mapping[str, Any], name: str) -> bool:
    """Return whether the manifest lists a file, with the hash of its content."""
    expected = files.get(name)
    return isinstance(expected, dict) and file_hash(folder / name) == expected.get("sha256")


def checkpoint_folders(run: Path) -> list[Path]:
    """Return a run's checkpoint folders that have a manifest, valid or not."""
    if not run.is_dir():
        return []
    folders = filter(is_named_checkpoint, run.iterdir())
    return sorted(path for path in folders if os.path.lexists(path / MANIFEST))


def restore_interrupted_best(run: Path) -> None:
    """Put `best/` back if a process was killed while replacing it. Raises OSError."""
    put_back(run / f".{BEST}.old", run / BEST, is_checkpoint)


def find_checkpoints(run: Path) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return a run's valid checkpoints, the newest first, and the problems of invalid ones.

    Among checkpoints of one step, `epoch-N` comes first, then `best`, then `step-N`.
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
    """Remove numbered checkpoints that are not in `keep`, and leftovers of killed processes.

    Raises OutputError, or FolderMovedError if this process locked a folder above that was moved.
    """
    with as_output_error(run, "--checkpoint-dir"):
        check_not_moved(run)
        for path in run.iterdir():
            numbered = _NUMBERED_NAME.fullmatch(path.name) and path not in keep
            # A backup is removed only if its replacement exists.
            backup = path.name.endswith(".old") and (run / path.name[1:-4]).exists()
            if is_temporary(path):
                _remove_temporary(path)
            elif (numbered or backup) and is_checkpoint(path):
                with suppress(OSError):
                    # Renamed first: a removal that is cut short leaves no incomplete checkpoint.
                    aside = beside(path)
                    move(path, aside)
                    discard(aside)


def _remove_temporary(path: Path) -> None:
    with suppress(OSError):
        if is_folder(path):
            remove_folder(path, lambda name: name in _FILES or is_temporary(Path(name)))
        else:
            remove_file(path)
