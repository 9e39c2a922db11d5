"""Reservations of memory by the runs on this machine.

Each run keeps a small file in a common folder, with the amount that it reserves, and locks the
file. When the run's process dies, the lock is released, and the next reader removes the file.
"""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.files.lock import Lock, LockHeldError, holder_of
from mlxtune.core.files.ours import ensure_folder, remove_file
from mlxtune.core.formatting import byte_size
from mlxtune.errors import MemoryLimitError

_SUFFIX = ".run"
_NAME = re.compile(r"[0-9]+-[0-9]+\.run")
_GB = 1e9
# Only one process at a time may read and change the reservations; each needs only an instant.
_MUTEX_NAME = "door.lock"
_MUTEX_SECONDS = 5.0
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Reservation:
    """The memory, in bytes, that another process has reserved, and a description of its run."""

    pid: int
    size: int
    run: str

    def describe(self) -> str:
        return f"process {self.pid} holds {byte_size(self.size)} for {self.run}"


def reserve(folder: Path, size: int, capacity: int, run: str) -> Lock:
    """Reserve memory for a run until the returned lock is released or this process ends.

    `size` and `capacity` are in bytes.

    Raises MemoryLimitError, which names the other runs, if all reservations together would exceed
    `capacity`. Raises OSError if the folder cannot be written.
    """
    ensure_folder(folder)
    try:
        mutex = Lock(folder / _MUTEX_NAME, seconds=_MUTEX_SECONDS)
    except LockHeldError as error:
        raise TimeoutError(f"{folder / _MUTEX_NAME} is held by another process") from error
    try:
        others = reservations(folder)
        if others and sum(other.size for other in others) + size > capacity:
            raise MemoryLimitError(
                f"this run needs {size / _GB:.1f} GB of {capacity / _GB:.1f}, and "
                f"{'; '.join(each.describe() for each in others)}: wait for it with --wait, "
                "lower --memory-limit, or run anyway with --ignore-ledger"
            )
        name = f"{os.getpid()}-{time.monotonic_ns()}{_SUFFIX}"
        return Lock(folder / name, {"bytes": size, "run": run})
    finally:
        mutex.release()


def reserve_when_free(
    folder: Path,
    size: int,
    capacity: int,
    run: str,
    warn: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Lock:
    """Reserve memory as soon as it is free; `warn` is called once with the reason for waiting.

    Raises OSError as `reserve` does.
    """
    warned = False
    while True:
        try:
            return reserve(folder, size, capacity, run)
        except MemoryLimitError as error:
            if not warned:
                warn(f"waiting: {str(error).partition(': wait for it')[0]}")
            warned = True
            sleep(POLL_SECONDS)


def reservations(folder: Path) -> list[Reservation]:
    """Return the reservations of other processes, and remove the files of dead processes."""
    reserved = []
    for path in sorted(path for path in folder.glob("*") if _NAME.fullmatch(path.name)):
        holder = holder_of(path)
        if holder is None:
            with suppress(OSError):
                remove_file(path)
            continue
        pid, size, run = holder.get("pid"), holder.get("bytes"), holder.get("run")
        if isinstance(pid, int) and isinstance(size, int) and isinstance(run, str):
            reserved.append(Reservation(pid, max(size, 0), run))
    return reserved
