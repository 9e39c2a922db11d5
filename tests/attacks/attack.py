"""Runs a command with an attacker's input, and checks its CPU time and memory."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.command import Outcome

SECONDS, MEMORY = 10, 1.5e9
# The alarm allows for tests that run at the same time; an unbounded attack takes minutes or more.
_PATIENCE = 6
_KB = 1 if sys.platform == "darwin" else 1024


@dataclasses.dataclass(frozen=True)
class Ended(Outcome):
    """The outcome of a command, with `seconds` of CPU time and the peak `memory` in bytes."""

    seconds: float
    memory: int

    @property
    def within_limits(self) -> bool:
        return self.seconds < SECONDS and self.memory < MEMORY


def attack(*arguments: object, command: list[str] | None = None, **options: Any) -> Ended:
    """Run a command for at most 60 s. `options` are Popen's; redirected streams are not read."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        given = command or [sys.executable, "-m", "mlxtune"]
        process = subprocess.Popen(
            [
                *given,
                *(
                    argument if isinstance(argument, bytes) else str(argument)
                    for argument in arguments
                ),
            ],
            **{**streams, "start_new_session": True, **options},
        )
        alarm = threading.Timer(SECONDS * _PATIENCE, lambda: os.killpg(process.pid, signal.SIGKILL))
        alarm.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            alarm.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        seconds = usage.ru_utime + usage.ru_stime
        # On Linux, ru_maxrss is at least the parent's value; if both are equal, the command took no
        # more than that.
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory = 0 if usage.ru_maxrss <= own else usage.ru_maxrss * _KB
        return Ended(process.returncode, *texts, seconds, memory)


def refused(outcome: Ended) -> str:
    """Check that a command kept the limits and printed one error message; return the message."""
    error = outcome.error
    assert outcome.within_limits, f"{outcome.seconds:.1f} s, {outcome.memory / 1e9:.1f} GB"
    return error


def contents(folder: Path, *, folder_times: bool = True) -> dict[str, tuple[int, int, bytes | str]]:
    """Return the inode, modification time and content (or link target) of each path in a folder.

    Without `folder_times`, the modification times of folders are 0.
    """
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content: bytes | str = ""
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        time = status.st_mtime_ns if folder_times or not path.is_dir() else 0
        found[str(path.relative_to(folder))] = (status.st_ino, time, content)
    return found
