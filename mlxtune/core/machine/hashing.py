"""Which model it was: a hash over the files of its folder that decide what it computes."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from pathlib import Path

from mlxtune.core.machine.files import file_hash, make_folder, read_json, write_json
from mlxtune.errors import ModelError, OutputError

# Hashes of files that have not changed since, by their path.
FILE = "hashes.json"
_KEPT = 1000


class ModelHash:
    """`sha256:` over a model's config.json and weights, by name and content.

    It is computed beside what else is done: gigabytes take seconds. A file that has the size and
    the times that it had in an earlier run is not read again.
    """

    def __init__(self, folder: Path, cache: Path | None) -> None:
        self._folder, self._cache = folder, cache
        self._found: str | None = None
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()

    def result(self) -> str:
        """Return the hash, when it is there. Raises ModelError when a file cannot be read."""
        self._thread.join()
        if self._found is None:
            raise ModelError(f"{self._folder}: cannot be read: {self._problem}")
        return self._found

    def _compute(self) -> None:
        try:
            self._found = model_hash(self._folder, self._cache)
        except OSError as error:
            self._problem = error


def model_hash(folder: Path, cache: Path | None) -> str:
    """Return what ModelHash does. Raises OSError."""
    files = sorted([folder / "config.json", *folder.glob("model*.safetensors")])
    known = _known(cache)
    digest = hashlib.sha256()
    new = {}
    for path in files:
        at = path.resolve()
        found = at.stat()
        times = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
        entry = known.get(str(at))
        if not isinstance(entry, list) or entry[:-1] != times:
            entry = [*times, file_hash(at)]
            new[str(at)] = entry
        digest.update(f"{path.name} {entry[-1]}\n".encode())
    if cache is not None and new:
        kept = dict(list((known | new).items())[-_KEPT:])
        with suppress(OutputError):  # it is computed again, then
            make_folder(cache)
            write_json(cache / FILE, kept)
    return f"sha256:{digest.hexdigest()}"


def _known(cache: Path | None) -> dict[str, object]:
    if cache is None:
        return {}
    try:
        return read_json(cache / FILE)
    except (OSError, ValueError):
        return {}
