"""Files that are written whole or not at all: beside their target, flushed, then renamed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxtune.errors import OutputError

# Of files that we wrote ourselves: what is longer was not written by us.
MAX_OWN_BYTES = 256 * 2**20
# What file systems say that cannot flush a folder, such as those on the network.
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


@contextmanager
def as_output_error(target: Path, option: str = "path") -> Iterator[None]:
    """Within it, an OSError becomes an OutputError that names the target and the option."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"{target}: cannot be written: {error.strerror or error}: "
            f"free space, mend permissions or choose another {option}"
        ) from error


def write_file(target: Path, content: Iterable[bytes]) -> None:
    """Put a file in place whole or not at all; its content may come piece by piece.

    Raises OutputError, leaving what stood there before.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with as_output_error(target):
        try:
            with temporary.open("wb") as file:
                file.writelines(content)
                file.flush()
                _sync(file.fileno())
            temporary.replace(target)
            sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(target: Path, value: Any) -> None:
    """Put a JSON file in place whole or not at all. Raises OutputError."""
    write_file(target, [(json.dumps(value, indent=2, allow_nan=False) + "\n").encode()])


def append_line(target: Path, line: str) -> None:
    """Append a line to a text file, which is made where it is missing: all of it or nothing.

    Raises OutputError.
    """
    with as_output_error(target, "file"), target.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        begins = not end or file.read(1) == b"\n"
        try:
            file.write(("" if begins else "\n").encode() + line.encode() + b"\n")
            file.flush()
            _sync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise


def read_own(path: Path) -> bytes:
    """Return the content of a file that was written here.

    Raises ValueError for what is no file, such as a link or a pipe, or is too large; and OSError.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path.name} is no regular file")
    if found.st_size > MAX_OWN_BYTES:
        raise ValueError(f"{path.name} is too large")
    return path.read_bytes()


def read_given_json(path: Path) -> dict[str, Any]:
    """Do what `read_json` does with a file that a person named, which may be a link to it.

    Hugging Face's cache is made of links.
    """
    return read_json(Path(os.path.realpath(path)))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file that was written here.

    Raises ValueError, also for one nested too deep, and OSError.
    """
    content = read_own(path)
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deep") from error
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder: a rename in it survives a power cut only then. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)
    # On macOS, fsync leaves the content in the cache of the drive; not every file system has this.
    if hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


def check_writable(folder: Path, option: str) -> None:
    """Raise OutputError unless files can be made in the folder, or the folder itself can be made.

    Leaves nothing behind. `option` is what named the folder.
    """
    with as_output_error(folder, option):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise OutputError(
                f"{folder}: cannot be written: {existing} is a file, not a folder: "
                f"choose another {option}"
            )
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".mlxtune-"):
            pass


def make_folder(folder: Path) -> None:
    """Make the folder and those above it where they are missing. Raises OutputError."""
    with as_output_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
