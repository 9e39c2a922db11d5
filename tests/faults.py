"""A fake disk that fails, or a process that dies, at a chosen file operation."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The operations that write; any call may fail.
OPERATIONS = [
    (Path, "mkdir"),
    (Path, "open"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "unlink"),
    (os, "fdopen"),
    (os, "fsync"),
    (shutil, "rmtree"),
]
# The operations that fail on a full or broken disk, where files can still be removed.
_MAKING = {"mkdir", "open", "fdopen", "rename", "replace", "fsync", "write"}
CRASH = -1
KINDS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES, "crash": CRASH}


class Crash(BaseException):
    """The process is dead: nothing more reaches the disk."""


class FaultyDisk:
    """Fails file operation number `fails_at`, counted from 1.

    If that operation is a write, half of its data is written. The operation fails with `code`, and
    later operations succeed. With CRASH, that operation and all later ones raise Crash, so that no
    cleanup happens either. Only operations in the folder `within` count, by default all operations.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        fails_at: int,
        code: int = errno.ENOSPC,
        *,
        within: Path | None = None,
    ) -> None:
        self.calls = 0
        self.fails_at = fails_at
        self.code = code
        self.within = within
        for owner, name in OPERATIONS:
            monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.within and isinstance(args[0], Path):
                inside = args[0] == self.within or self.within in args[0].parents
                if not inside:
                    return operation(*args, **options)
            opens = name in ("open", "fdopen")
            mode = (*args[1:2], options.get("mode", "r"))[0] if opens else "w"
            if opens and not set(mode) & set("wax+"):
                self._check_alive()
                return operation(*args, **options)
            self.pass_or_fail(name, ignores=bool(options.get("ignore_errors")))
            found = operation(*args, **options)
            return _File(found, self) if opens else found

        return call

    def _check_alive(self) -> None:
        if self.code == CRASH and self.failed:
            raise Crash

    def pass_or_fail(self, name: str, *, ignores: bool = False) -> None:
        """Count an operation, and raise an error if this operation should fail."""
        self._check_alive()
        if self.code != CRASH and (ignores or name not in _MAKING):
            return
        self.calls += 1
        if self.calls == self.fails_at:
            if self.code == CRASH:
                raise Crash
            raise OSError(self.code, os.strerror(self.code))

    @property
    def failed(self) -> bool:
        """True once the failing operation has been called."""
        return self.calls >= self.fails_at


class _File:
    """A file open for writing, whose writes may fail halfway."""

    def __init__(self, file: Any, disk: FaultyDisk) -> None:
        self._file = file
        self._disk = disk

    def write(self, content: Any) -> int:
        try:
            self._disk.pass_or_fail("write")
        except BaseException:
            self._file.write(content[: len(content) // 2])
            raise
        return int(self._file.write(content))

    def writelines(self, contents: Any) -> None:
        for content in contents:
            self.write(content)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
