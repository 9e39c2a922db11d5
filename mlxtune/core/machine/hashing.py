"""The hash of a model, over the files of its folder that determine its computation."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

from mlxtune.core.machine.files import file_hash, make_folder, read_json, write_json
from mlxtune.errors import ModelError, OutputError

# The cache of file hashes by path, with the size and times that the file had.
FILE = "hashes.json"
_KEPT = 1000


class ModelHash:
    """`sha256:` over a model's config.json and weights, by name and content.

    It is computed in the background, as gigabytes take seconds. A file whose size and times are
    those of an earlier run is not read again.
    """

    def __init__(self, folder: Path, cache: Path | None) -> None:
        self._folder, self._cache = folder, cache
        self._hash: Future[str] = Future()
        # A daemon, unlike an executor's threads: it must not delay the end of the process.
        Thread(target=self._compute, daemon=True).start()

    def result(self) -> str:
        """Wait for the hash and return it. Raises ModelError if a file cannot be read."""
        try:
            return self._hash.result()
        except OSError as error:
            raise ModelError(f"{self._folder}: cannot be read: {error}") from error

    def _compute(self) -> None:
        try:
            self._hash.set_result(model_hash(self._folder, self._cache))
        except Exception as error:  # noqa: BLE001  raised again by `result`
            self._hash.set_exception(error)


def model_hash(folder: Path, cache: Path | None) -> str:
    """Compute a ModelHash now. Raises OSError."""
    files = sorted([folder / "config.json", *folder.glob("model*.safetensors")])
    known = _known(cache)
    digest = hashlib.sha256()
    new = {}
    for path in files:
        real = path.resolve()
        stat = real.stat()
        times = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        entry = known.get(str(real))
        if not isinstance(entry, list) or entry[:-1] != times:
            entry = [*times, file_hash(real)]
            new[str(real)] = entry
        digest.update(f"{path.name} {entry[-1]}\n".encode())
    if cache is not None and new:
        kept = dict(list((known | new).items())[-_KEPT:])
        with suppress(OutputError):  # hashes are then computed again next time
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
