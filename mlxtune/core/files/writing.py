"""Writes files atomically: under a temporary name, then flushed and renamed."""

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from mlxtune.core.files import ours
from mlxtune.core.files.lock import check_not_moved
from mlxtune.core.files.ours import ForeignFileError
from mlxtune.core.files.reading import open_regular
from mlxtune.errors import OutputError

# A name as long as the longest name written into a folder, including temporary names.
_LONG_NAME = "long-name".ljust(64, "-")
_TEMPORARY_NAME = re.compile(r"\.mlxtune-.+\.[0-9a-f]{16}\.tmp")
# Remedies for an error, in addition to choosing another place.
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space or "),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "fix permissions or "),
    errno.EMFILE: "allow more open files with ulimit -n or ",
    errno.EFBIG: "allow larger files with ulimit -f or ",
}
# The errors of file systems that cannot flush a folder, such as network file systems.
_NO_FLUSH_ERRORS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


@contextmanager
def as_output_error(target: Path, option: str = "path") -> Iterator[None]:
    """Turn an OSError into an OutputError that names the target and the option.

    Raises FolderMovedError instead if this process locked a folder above the target that was moved.
    """
    try:
        with _noticing_moves(target):
            yield
    except OutputError:
        raise
    except ForeignFileError as error:
        raise OutputError(
            f"{error.filename} cannot be written: {error.strerror}: move it away, or choose "
            f"another {option}"
        ) from error
    except OSError as error:
        raise OutputError(
            f"{target} cannot be written: {error.strerror or error}: "
            f"{_REMEDIES.get(error.errno or 0, '')}choose another {option}"
        ) from error


@contextmanager
def _noticing_moves(target: Path) -> Iterator[None]:
    try:
        yield
    except OutputError:
        raise
    except OSError:
        check_not_moved(target)
        raise


class BestEffort:
    """Attempts to write while training continues; `report` gets the first failure in a row.

    `outlook` is the end of the report: what follows from the failure.
    """

    def __init__(self, report: Callable[[str], None], outlook: str) -> None:
        self._report, self._outlook = report, outlook
        self.failing = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        try:
            yield
        except OutputError as error:
            if not self.failing:
                self._report(f"{error}; training continues, and {self._outlook}")
            self.failing = True
        else:
            self.failing = False


def beside(target: Path) -> Path:
    """Return an unpredictable name next to the target, for an incomplete file."""
    return target.with_name(ours.temporary_name(target.name))


def is_temporary(path: Path) -> bool:
    """Return whether `beside` made this name: a killed process may have left the file behind."""
    return _TEMPORARY_NAME.fullmatch(path.name) is not None


def open_to_append(path: Path) -> BinaryIO:
    """Open a file of ours, new or not, to append to it. Raises ForeignFileError or OSError."""
    check_not_moved(path)
    return os.fdopen(ours.open_ours(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")


def new_file(path: Path) -> IO[bytes]:
    return path.open("x+b")


def open_to_write(path: Path) -> IO[bytes]:
    """Open a file of ours, new or emptied, to write it. Raises ForeignFileError or OSError."""
    check_not_moved(path)
    file = os.fdopen(ours.open_ours(path, os.O_RDWR | os.O_CREAT), "r+b")
    file.truncate(0)
    return file


def write_file(target: Path, content: Iterable[bytes], *, private: bool = False) -> None:
    """Write a file atomically, from pieces of its content.

    Only the user may read a `private` file. Raises OutputError; the target then keeps its content.
    """
    temporary = beside(target)
    with as_output_error(target):
        check_not_moved(target)
        ours.check_is_ours(target)
        try:
            with temporary.open("xb") as file:
                if private:
                    os.fchmod(file.fileno(), 0o600)
                file.writelines(content)
                file.flush()
                _sync(file.fileno())
            ours.replace_file(temporary, target)
            sync(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(target: Path, value: Any, *, private: bool = False) -> None:
    """Write a JSON file as `write_file` does. Raises OutputError."""
    write_file(target, [as_json(value)], private=private)


def as_json(value: Any) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def append_line(target: Path, line: str) -> None:
    """Append a line to a text file, new or not; undo a partial write. Raises OutputError."""
    with as_output_error(target, "file"), open_to_append(target) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        separator = b"" if not end or file.read(1) == b"\n" else b"\n"
        try:
            file.write(separator + line.encode() + b"\n")
            file.flush()
            _sync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename survives a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH_ERRORS:
            raise
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)
    # On macOS, fsync leaves data in the drive's cache; not every file system supports F_FULLFSYNC.
    if hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


def check_writable(folder: Path, option: str, name: str = _LONG_NAME) -> None:
    """Raise OutputError unless a file of this name can be written into the folder.

    The folder may not exist yet. The names of the folder and the file are tried in the nearest
    existing folder, as file systems differ in the names that they refuse; nothing is left behind.
    `option` is named in errors.
    """
    with as_output_error(folder / name if name != _LONG_NAME else folder, option):
        real = _real(folder)
        existing = next(path for path in (real, *real.parents) if path.exists())
        if not existing.is_dir():
            raise OutputError(
                f"{folder} cannot be written: {existing} is a file, not a folder: "
                f"choose another {option}"
            )
        with tempfile.TemporaryDirectory(dir=existing, prefix=".mlxtune-") as trial:
            trial_folder = Path(trial) / real.relative_to(existing)
            trial_folder.mkdir(parents=True, exist_ok=True)
            (trial_folder / name).touch()


def check_outputs(written: Iterable[Path], read: Iterable[Path], option: str) -> None:
    """Raise OutputError for a path, given by `option`, that is unwritable or is also read."""
    read = list(read)
    for path in written:
        with as_output_error(path, option):
            if path.is_dir():
                raise OutputError(f"{path} is a folder: {option} takes the name of a file")
            # /dev/stdout may be a link to a file, but the write would replace the device itself.
            parent = _real(path.parent)
            device = parent == Path("/dev") or parent.is_relative_to("/proc")
            if device:
                raise OutputError(f"{path} cannot be written as a file: choose another {option}")
            if path.exists() and not path.is_file():
                raise OutputError(f"{path} is not a regular file: choose another {option}")
        if any(is_same_place(path, each) for each in read):
            raise OutputError(f"{path} is read by this run: choose another {option}")
        check_writable(path.parent, option, path.name)
        with as_output_error(path, option):
            ours.check_is_ours(path)


def is_same_place(one: Path, other: Path) -> bool:
    """Return whether two paths lead to the same place, such as two spellings of a name on macOS."""
    try:
        return _real(one) == _real(other) or one.samefile(other)
    except (OSError, ValueError):  # ValueError for a null character
        return False


def _real(path: Path) -> Path:
    # Accepts a link to itself, unlike Path.resolve.
    return Path(os.path.realpath(path))


def make_folder(folder: Path, option: str = "path") -> None:
    """Make a folder and its missing parents. Raises OutputError."""
    with as_output_error(folder, option):
        check_not_moved(folder)
        ours.ensure_folder(folder)


def copy_file(path: Path, target: Path) -> None:
    with open_regular(path) as file, new_file(target) as copy:
        shutil.copyfileobj(file, copy)


def mark_used(path: Path) -> None:
    os.utime(path, follow_symlinks=False)
