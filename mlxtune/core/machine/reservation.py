"""The memory that runs on this machine have reserved: who holds how much, and whether more fits.

Each run holds a small file in one folder, locked while it lives, that says what it takes. A file
whose process has died is no longer locked, and is removed by whoever looks next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.machine.lock import Held, Lock, holder_of
from mlxtune.errors import MemoryLimitError

_DOOR = "door.lock"
_SUFFIX = ".run"
_GB = 1e9
# The door is held for as long as it takes to look at a few small files.
_DOOR_SECONDS, _DOOR_POLL = 5.0, 0.02
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Reservation:
    """What another process has reserved: bytes, and for which run."""

    pid: int
    size: int
    run: str

    def describe(self) -> str:
        """Say who holds what."""
        return f"process {self.pid} holds {self.size / _GB:.1f} GB for {self.run}"


def reserve(folder: Path, size: int, capacity: int, run: str) -> Lock:
    """Reserve memory for as long as this process lives, or until the lock is released.

    `size` and `capacity` are in bytes; `run` says what for.

    Raises MemoryLimitError, which names the others, when all together would not fit into
    `capacity`; OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _door(folder):
        others = reservations(folder)
        if others and sum(each.size for each in others) + size > capacity:
            raise MemoryLimitError(
                f"this run needs {size / _GB:.1f} GB of {capacity / _GB:.1f}, and "
                f"{'; '.join(each.describe() for each in others)}: wait for it with --wait, "
                "plan for less with --memory-limit, or insist with --ignore-ledger"
            )
        own = f"{os.getpid()}-{time.monotonic_ns()}{_SUFFIX}"
        return Lock(folder / own, {"bytes": size, "run": run})


def reserve_when_free(
    folder: Path,
    size: int,
    capacity: int,
    run: str,
    tell: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Lock:
    """Reserve memory as soon as it is free; `tell` hears once whom it is waiting for.

    Raises OSError as `reserve` does.
    """
    told = False
    while True:
        try:
            return reserve(folder, size, capacity, run)
        except MemoryLimitError as error:
            if not told:
                tell(f"waiting: {str(error).partition(': wait for it')[0]}")
            told = True
            sleep(POLL_SECONDS)


def reservations(folder: Path) -> list[Reservation]:
    """Return what other processes have reserved."""
    return list(_held(folder))


def _held(folder: Path) -> Iterator[Reservation]:
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        holder = holder_of(path)
        if holder is None:
            with suppress(OSError):
                path.unlink()
            continue
        pid, size, run = holder.get("pid"), holder.get("bytes"), holder.get("run")
        if isinstance(pid, int) and isinstance(size, int) and isinstance(run, str):
            yield Reservation(pid, max(size, 0), run)


@contextmanager
def _door(folder: Path) -> Iterator[None]:
    """Have one process at a time look and reserve. Raises OSError when the door stays shut."""
    deadline = time.monotonic() + _DOOR_SECONDS
    while True:
        try:
            lock = Lock(folder / _DOOR)
            break
        except Held:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{folder / _DOOR} is held by another process") from None
            time.sleep(_DOOR_POLL)
    try:
        yield
    finally:
        lock.release()
