"""Caches encoded files on disk, so that no file is encoded twice.

An entry is a folder named by a hash of everything that its content depends on. It holds the columns
of ExampleArrays, account.json with the skipped rows and the notes, and, written last, the checksums
of these files. An entry whose files do not match their checksums is ignored.
"""

import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.config.limits import OWN_JSON_LIMITS
from mlxtune.core.data.encode import EncodedRows
from mlxtune.core.data.encoded_file import COLUMNS, EncodedFile, ExampleArrays, write_arrays
from mlxtune.core.data.problems import RowTally, SkippedRows
from mlxtune.core.files.ours import move, remove_folder
from mlxtune.core.files.reading import file_hash, read_value
from mlxtune.core.files.scratch import PREFIX, scratch_folder
from mlxtune.core.files.writing import as_output_error, make_folder, mark_used, new_file

ACCOUNT, CHECKSUMS = "account.json", "mlxtune-checksums.json"
# The maximum size of all entries together; the least recently used entries are evicted first.
MAX_BYTES = 10 * 10**9
_ABANDONED_SECONDS = 86_400.0

# Encodes a file: yields a few rows' examples at a time, and adds to the skipped rows and the notes.
Encode = Callable[[SkippedRows, RowTally], Iterable[EncodedRows]]


def cache_key(parts: Any) -> str:
    """Return a hash of JSON-ready values, as the key of an entry."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def encode_file(
    path: Path,
    encode: Encode,
    *,
    cache: Path | None,
    key: str,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> EncodedFile:
    """Return a file's examples from the cache, or encode the file and add them to the cache.

    `on_rows` is called now and then with the number of rows encoded so far.

    Without a cache, or if the cache cannot be written, the examples are kept until the process
    ends. Raises OutputError if they cannot be written to the disk.
    """
    if cache is not None and (cached := _read(cache / key, path)) is not None:
        return cached
    skipped, notes = SkippedRows(path), RowTally()
    parent = _writable(cache)
    with (
        as_output_error(parent or Path(tempfile.gettempdir()), "--cache-dir"),
        scratch_folder("data", parent) as folder,
    ):
        write_arrays(folder, encode(skipped, notes), on_rows)
        # Map the files before the folder is moved or removed: a mapping outlives its file's name.
        arrays = ExampleArrays.mapped(folder)
        if parent is not None:
            _write_account(folder, skipped, notes)
            if not _is_whole(parent / key):
                _remove(parent / key)
            with suppress(OSError):  # another process stored the entry first, and it stays
                move(folder, parent / key)
            _prune(parent, keep=parent / key)
    return EncodedFile(arrays, skipped, notes)


def _writable(cache: Path | None) -> Path | None:
    if cache is not None:
        with suppress(OSError):
            make_folder(cache)
            return cache if os.access(cache, os.W_OK) else None
    return None


def _prune(cache: Path, keep: Path) -> None:
    """Evict the least recently used entries beyond MAX_BYTES, and leftovers of killed runs."""
    for left in cache.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                _remove(left)
    entries = []
    for checksums in cache.glob(f"*/{CHECKSUMS}"):
        with suppress(OSError):  # removed by another process
            size = sum(file.stat().st_size for file in checksums.parent.iterdir())
            entries.append((checksums.stat().st_mtime, checksums.parent, size))
    for entry in least_used(entries, keep):
        _remove(entry)


def least_used(entries: Iterable[tuple[float, Path, int]], keep: Path) -> Iterator[Path]:
    """Yield the paths to evict, least recently used first, until the cache fits MAX_BYTES."""
    oldest = sorted(entries)
    total = sum(size for _, _, size in oldest)
    for _, entry, size in oldest:
        if total > MAX_BYTES and entry != keep:
            total -= size
            yield entry


def _remove(entry: Path) -> None:
    """Remove an entry, complete or not, unless it contains files that no entry has."""
    with suppress(OSError):
        remove_folder(entry, {*COLUMNS, ACCOUNT, CHECKSUMS}.__contains__)


def _write_account(folder: Path, skipped: SkippedRows, notes: RowTally) -> None:
    account: dict[str, Any] = {
        name: {"counts": tally.counts, "places": tally.places}
        for name, tally in (("skipped", skipped), ("notes", notes))
    }
    account |= {"absent": skipped.absent, "unanswered": _packed(skipped.unanswered)}
    with new_file(folder / ACCOUNT) as file:
        file.write(json.dumps(account).encode())
    checksums = json.dumps(_checksums(folder))
    with new_file(folder / CHECKSUMS) as file:
        file.write(checksums.encode())


def _read(entry: Path, path: Path) -> EncodedFile | None:
    """Return an entry, or None if it is missing or damaged."""
    try:
        if not _is_whole(entry):
            return None
        account = read_value(entry / ACCOUNT, OWN_JSON_LIMITS)
        arrays = ExampleArrays.mapped(entry)
    except (OSError, ValueError):
        return None
    with suppress(OSError):  # a read-only cache
        mark_used(entry / CHECKSUMS)
    fields = _tally_fields(account["skipped"])
    skipped = SkippedRows(path, account["absent"], _unpacked(account["unanswered"]), **fields)
    return EncodedFile(arrays, skipped, RowTally(**_tally_fields(account["notes"])))


def _is_whole(entry: Path) -> bool:
    """Return whether an entry is there, and its files match their checksums."""
    try:
        return bool(read_value(entry / CHECKSUMS, OWN_JSON_LIMITS) == _checksums(entry))
    except (OSError, ValueError):
        return False


def _tally_fields(saved: dict[str, Any]) -> dict[str, Any]:
    places = {
        kind: [(row, detail) for row, detail in rows] for kind, rows in saved["places"].items()
    }
    return {"counts": Counter(saved["counts"]), "places": places}


def _packed(rows: set[int]) -> str:
    """Return row numbers as the bits of hexadecimal digits."""
    bits = np.zeros(max(rows, default=-1) + 1, dtype=np.bool_)
    bits[list(rows)] = True
    return np.packbits(bits).tobytes().hex()


def _unpacked(digits: str) -> set[int]:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(digits), dtype=np.uint8))
    return set(np.flatnonzero(bits).tolist())


def _checksums(folder: Path) -> dict[str, str]:
    return {file.name: file_hash(file) for file in folder.iterdir() if file.name != CHECKSUMS}
