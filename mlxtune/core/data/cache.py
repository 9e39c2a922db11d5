"""Encoded files on disk, so that no file is encoded twice.

An entry is a folder named by a key over everything that its content depends on. It holds the
columns of ExampleArrays and, written last, account.json with the skipped rows, the notes and
checksums of the columns and of itself. An entry whose checksums differ is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxtune.core.data.bad_rows import SkippedRows
from mlxtune.core.data.corpus import ArraysWriter, ExampleArrays
from mlxtune.core.data.encode import EncodedRows
from mlxtune.core.data.ledger import EncodedFile
from mlxtune.core.data.notes import Notes, RowTally
from mlxtune.errors import OutputError

ACCOUNT = "account.json"
# Of all entries together; the least recently used are removed first.
MAX_BYTES = 10 * 10**9
_TEMPORARY = ".mlxtune-"
_ABANDONED_SECONDS = 86_400.0

# Encodes a file: yields rows with their examples, and adds to the skipped rows and the notes.
Encode = Callable[[SkippedRows, Notes], Iterable[EncodedRows]]


def key_of(parts: Any) -> str:
    """Return a key for JSON-ready values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def encode_file(path: Path, encode: Encode, *, cache: Path | None, key: str) -> EncodedFile:
    """Return an encoded file from the cache, or encode and store it there.

    Without a cache, or if it cannot be written, the columns are kept until the process ends.

    Raises OutputError when there is no space for them.
    """
    if cache is not None and (cached := _read(cache / key, path)) is not None:
        return cached
    skipped, notes = SkippedRows(path), Notes()
    with _folder(cache) as folder:
        try:
            with ArraysWriter(folder) as writer:
                for rows in encode(skipped, notes):
                    writer.add(rows)
            _write_account(folder, skipped, notes)
        except OSError as error:
            raise OutputError(
                f"{folder.parent}: cannot write encoded data: {error.strerror or error}: "
                "free space or choose another --cache-dir"
            ) from error
        # Map before the folder is moved or removed: a map outlives its file name.
        arrays = ExampleArrays.open(folder)
        if cache is not None and folder.parent == cache:
            _keep(folder, cache / key)
            _prune(cache, keep=cache / key)
    return EncodedFile(arrays, skipped, notes)


@contextmanager
def _folder(cache: Path | None) -> Iterator[Path]:
    """Make a folder to write in, and remove it at the end unless it was renamed."""
    parent = None
    if cache is not None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            parent = cache if os.access(cache, os.W_OK) else None
        except OSError:
            parent = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
    except OSError as error:
        raise OutputError(
            f"cannot make a folder for encoded data: {error.strerror or error}: "
            "free space or choose another --cache-dir"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _keep(folder: Path, entry: Path) -> None:
    shutil.rmtree(entry, ignore_errors=True)  # a damaged one
    with suppress(OSError):  # another process was first
        folder.rename(entry)


def _prune(cache: Path, keep: Path) -> None:
    """Remove the least recently used entries beyond MAX_BYTES, and leftovers of killed runs."""
    for left in cache.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    entries = []
    for account in cache.glob(f"*/{ACCOUNT}"):
        try:
            size = sum(file.stat().st_size for file in account.parent.iterdir())
            entries.append((account.stat().st_mtime, account.parent, size))
        except OSError:
            continue  # removed by another process
    total = sum(size for _, _, size in entries)
    for _, entry, size in sorted(entries):
        if total <= MAX_BYTES:
            break
        if entry != keep:
            shutil.rmtree(entry, ignore_errors=True)
            total -= size


def _write_account(folder: Path, skipped: SkippedRows, notes: Notes) -> None:
    account = {
        "checksums": {file.name: _checksum(file) for file in sorted(folder.iterdir())},
        "skipped": _tally(skipped),
        "notes": _tally(notes),
    }
    content = {"account": account, "checksum": _json_checksum(account)}
    (folder / ACCOUNT).write_text(json.dumps(content), encoding="utf-8")


def _read(entry: Path, path: Path) -> EncodedFile | None:
    """Return an entry, or None if there is none or it is damaged."""
    try:
        content = json.loads((entry / ACCOUNT).read_text(encoding="utf-8"))
        account = content["account"]
        if _json_checksum(account) != content["checksum"]:
            return None
        if any(_checksum(entry / name) != sum_ for name, sum_ in account["checksums"].items()):
            return None
        arrays = ExampleArrays.open(entry)
        skipped = SkippedRows(path, **_tally_fields(account["skipped"]))
        notes = Notes(**_tally_fields(account["notes"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    with suppress(OSError):  # a read-only cache
        os.utime(entry / ACCOUNT)
    return EncodedFile(arrays, skipped, notes)


def _tally(tally: RowTally) -> dict[str, Any]:
    return {"counts": tally.counts, "places": tally.places}


def _tally_fields(saved: dict[str, Any]) -> dict[str, Any]:
    places = {
        kind: [(row, detail) for row, detail in rows] for kind, rows in saved["places"].items()
    }
    return {"counts": Counter(saved["counts"]), "places": places}


def _json_checksum(value: Any) -> int:
    return zlib.crc32(json.dumps(value).encode())


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            value = zlib.crc32(block, value)
    return value
