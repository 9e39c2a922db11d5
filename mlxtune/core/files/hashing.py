"""The hash of a model over all files that determine its results, and a quick fingerprint."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

from mlxtune.core.files.reading import file_hash, open_regular, read_json
from mlxtune.core.files.tensor_files import read_header
from mlxtune.core.files.writing import make_folder, write_json
from mlxtune.errors import ModelError, OutputError

# The cache of file hashes by path, with the size, times and inode that each file had.
FILE = "hashes.json"
_KEPT = 1000
_PARTS = ("layout", "weights", "vectors")


def hash_in_background(folder: Path, cache: Path | None) -> Future[str]:
    """Compute `model_hash` in a thread, because hashing gigabytes takes seconds."""
    result: Future[str] = Future()

    def compute() -> None:
        try:
            result.set_result(model_hash(folder, cache))
        except Exception as error:  # noqa: BLE001  raised again by `result.result`
            result.set_exception(error)

    # A daemon, unlike an executor's threads: it must not delay the end of the process.
    Thread(target=compute, daemon=True).start()
    return result


def base_fingerprint(folder: Path) -> dict[str, str]:
    """Return hashes of a model's weights, computed in milliseconds.

    `layout` covers the weights' names, dtypes and shapes, `weights` 64 bytes of each weight, and
    `vectors` 64 bytes of each norm and bias, which stay the same when matrices are quantised. No
    hash depends on how the weights are split into files. Raises ModelError if a file cannot be
    read.
    """
    parts: dict[str, list[str]] = {name: [] for name in _PARTS}
    try:
        for path in folder.glob("model*.safetensors"):
            tensors = read_header(path).tensors
            with open_regular(path) as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                for name, info in tensors.items():
                    start, end = header[name]["data_offsets"]
                    file.seek(8 + length + start + (end - start) // 128 * 64)
                    middle = f"{name} {file.read(min(64, end - start)).hex()}"
                    parts["layout"].append(f"{name} {info.dtype} {info.shape}")
                    parts["weights"].append(middle)
                    if len(info.shape) == 1:
                        parts["vectors"].append(middle)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    return {
        name: hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:32]
        for name, lines in parts.items()
    }


def is_same_base(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two fingerprints come from the same model, quantised or not."""
    layout, weights, vectors = (one[name] == other[name] for name in _PARTS)
    return weights if layout else vectors


def model_hash(folder: Path, cache: Path | None) -> str:
    """Return `sha256:HASH` of a model's config.json and weights, by name and content.

    A file is not read again if it still has the size, times and inode that an earlier run recorded.
    Raises ModelError if a file cannot be read.
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
        raise ModelError(f"{folder} cannot be read: {error}") from error
    if cache is not None and new:
        recent = dict(list((known | new).items())[-_KEPT:])
        with suppress(OutputError):  # the next run then computes the hashes again
            make_folder(cache)
            write_json(cache / FILE, recent)
    return f"sha256:{digest.hexdigest()}"
