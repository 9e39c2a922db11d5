"""The hash of a model, over the files of its folder that determine its computation."""

import hashlib
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

from mlxtune.core.files.files import file_hash, make_folder, read_json, write_json
from mlxtune.errors import ModelError, OutputError

# The cache of file hashes by path, with the size and times that the file had.
FILE = "hashes.json"
_KEPT = 1000


def hash_in_background(folder: Path, cache: Path | None) -> Future[str]:
    """Start computing `model_hash`, as gigabytes take seconds."""
    result: Future[str] = Future()

    def compute() -> None:
        try:
            result.set_result(model_hash(folder, cache))
        except Exception as error:  # noqa: BLE001  raised again by `result.result`
            result.set_exception(error)

    # A daemon, unlike an executor's threads: it must not delay the end of the process.
    Thread(target=compute, daemon=True).start()
    return result


def model_hash(folder: Path, cache: Path | None) -> str:
    """Return `sha256:` over a model's config.json and weights, by name and content.

    A file whose size and times are those of an earlier run is not read again. Raises ModelError if
    a file cannot be read.
    """
    known: dict[str, object] = {}
    if cache is not None:
        with suppress(OSError, ValueError):
            known = read_json(cache / FILE)
    digest, new = hashlib.sha256(), {}
    try:
        for path in sorted([folder / "config.json", *folder.glob("model*.safetensors")]):
            real = path.resolve()
            stat = real.stat()
            times = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            entry = known.get(str(real))
            if not isinstance(entry, list) or entry[:-1] != times:
                entry = [*times, file_hash(real)]
                new[str(real)] = entry
            digest.update(f"{path.name} {entry[-1]}\n".encode())
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read: {error}") from error
    if cache is not None and new:
        kept = dict(list((known | new).items())[-_KEPT:])
        with suppress(OutputError):  # hashes are then computed again next time
            make_folder(cache)
            write_json(cache / FILE, kept)
    return f"sha256:{digest.hexdigest()}"
