"""The hash of a model over all files that determine its results, and a quick fingerprint."""

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeGuard

from mlxtune.config.limits import CONFIG_LIMITS
from mlxtune.core.files.reading import file_hash, open_regular, read_json, read_value
from mlxtune.core.files.tensor_files import TensorInfo, read_header
from mlxtune.core.files.writing import make_folder, write_json
from mlxtune.errors import ModelError, OutputError

# The cache of file hashes by path, with the size, times and inode that each file had.
FILE = "hashes.json"
_MAX_ENTRIES = 1000
WEIGHTS = "weights"
_PARTS = ("layout", WEIGHTS, "vectors")
# The hashes that fingerprints of earlier versions lack.
_SAMPLES, _CONFIG = "samples", "config"
# The number of pieces that are read of each weight, and their bytes.
_PIECES, _PIECE_BYTES = 16, 64
# Keys of config.json that do not decide a model's results, or that quantised copies change.
_NEUTRAL_KEYS = re.compile(
    r".*_token_id|_name_or_path|architectures|auto_map|(torch_)?dtype|quantization(_config)?"
    r"|transformers_version|unsloth_.*|use_cache|vision_config"
)


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


def base_fingerprint(folder: Path) -> dict[str, Any]:
    """Return hashes of a model's weights and config, computed in milliseconds.

    `layout` covers the weights' names, dtypes and shapes, `weights` 64 bytes of each weight, and
    `vectors` 64 bytes of each norm and bias, which stay the same when matrices are quantised.
    `samples` covers more bytes of each weight: any change of a contiguous eighth of a weight
    changes it. `config` has a hash of each value of config.json that decides the results. No hash
    depends on how the weights are split into files. Raises ModelError if a file cannot be read.
    """
    lines: dict[str, list[str]] = {name: [] for name in (*_PARTS, _SAMPLES)}
    with _as_model_error(folder):
        for name, info, read, size in _weights(folder):
            middle = f"{name} {read(size // 128 * _PIECE_BYTES, min(_PIECE_BYTES, size)).hex()}"
            lines["layout"].append(_layout_line(name, info))
            lines[WEIGHTS].append(middle)
            if len(info.shape) == 1:
                lines["vectors"].append(middle)
            lines[_SAMPLES].append(f"{name} {_sampled(name, read, size).hex()}")
        config = _hashes_of_config(read_value(folder / "config.json", CONFIG_LIMITS))
    return {name: _hash_of_lines(each) for name, each in lines.items()} | {_CONFIG: config}


def base_layout_hash(folder: Path) -> str:
    """Return the `layout` of a model's fingerprint, from the headers of its files alone."""
    with _as_model_error(folder):
        return _hash_of_lines(
            _layout_line(name, info)
            for path in folder.glob("model*.safetensors")
            for name, info in read_header(path).tensors.items()
        )


def is_fingerprint(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a recorded value is a fingerprint of this version or an earlier one.

    A fingerprint with other keys is forged, or from a later version.
    """
    return (
        isinstance(value, Mapping)
        and {*_PARTS} <= value.keys() <= {*_PARTS, _SAMPLES, _CONFIG}
        and isinstance(value.get(_CONFIG, {}), Mapping)
    )


def base_change(trained: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return what differs between the fingerprints of two models; None if they are the same model.

    A quantised copy is the same model. Fingerprints of an earlier version have fewer hashes; the
    others are not compared.
    """
    compared = (WEIGHTS, _SAMPLES) if trained["layout"] == now["layout"] else ("vectors",)
    if any(trained[name] != now[name] for name in compared if name in trained):
        return WEIGHTS
    own, config = trained.get(_CONFIG, now[_CONFIG]), now[_CONFIG]
    changed = (name for name in sorted({*own, *config}) if own.get(name) != config.get(name))
    return next((f"{name} in config.json" for name in changed), None)


@contextmanager
def _as_model_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error


_Read = Callable[[int, int], bytes]


def _weights(folder: Path) -> Iterator[tuple[str, TensorInfo, _Read, int]]:
    """Yield each weight of a model with its size, and a function that reads bytes at a place."""
    for path in folder.glob("model*.safetensors"):
        tensors = read_header(path).tensors
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name, info in tensors.items():
                start, end = header[name]["data_offsets"]
                yield name, info, partial(_read, file.fileno(), 8 + length + start), end - start


def _read(descriptor: int, start: int, place: int, size: int) -> bytes:
    return os.pread(descriptor, size, start + place)


def _sampled(name: str, read: _Read, size: int) -> bytes:
    """Return a hash over a piece of each part of a weight, at places that differ by weight."""
    part = size // _PIECES
    if part <= _PIECE_BYTES:
        return hashlib.sha256(read(0, size)).digest()
    # A generator seeded by text gives the same numbers in every version of Python.
    places = random.Random(name)
    digest = hashlib.sha256()
    for number in range(_PIECES):
        digest.update(
            read(number * part + int(places.random() * (part - _PIECE_BYTES)), _PIECE_BYTES)
        )
    return digest.digest()


def _layout_line(name: str, info: TensorInfo) -> str:
    return f"{name} {info.dtype} {info.shape}"


def _hash_of_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:32]


def _hashes_of_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a hash of each value that decides a model's results, by its keys joined by dots."""
    hashes: dict[str, str] = {}
    for name, value in config.items():
        if value is None or _NEUTRAL_KEYS.fullmatch(name):
            continue
        if isinstance(value, Mapping):
            hashes |= _hashes_of_config(value, f"{prefix}{name}.")
        else:
            text = json.dumps(float(value) if isinstance(value, int) else value, sort_keys=True)
            hashes[f"{prefix}{name}"] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return hashes


def model_hash(folder: Path, cache: Path | None) -> str:
    """Return `sha256:HASH` of a model's config.json and weights, by name and content.

    A file is not read again if it still has the size, times and inode that an earlier run recorded.
    Raises ModelError if a file cannot be read.
    """
    entries: dict[str, object] = {}
    if cache is not None:
        with suppress(OSError, ValueError):
            entries = read_json(cache / FILE)
    digest, new = hashlib.sha256(), {}
    try:
        for path in sorted([folder / "config.json", *folder.glob("model*.safetensors")]):
            real = path.resolve()
            stat = real.stat()
            times = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            entry = entries.get(str(real))
            if not isinstance(entry, list) or entry[:-1] != times:
                entry = [*times, file_hash(real)]
                new[str(real)] = entry
            digest.update(f"{path.name} {entry[-1]}\n".encode())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    if cache is not None and new:
        recent = dict(list((entries | new).items())[-_MAX_ENTRIES:])
        with suppress(OutputError):  # the next run then computes the hashes again
            make_folder(cache)
            write_json(cache / FILE, recent)
    return f"sha256:{digest.hexdigest()}"
