"""Start the command and return its output and exit code, for tests."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# The number of rows in the fixture `chat`.
ROWS = 20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The output and the exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Check that the command printed only one error message, and return the message."""
        assert self.code in (1, 2), self.err
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("mlxtune: error: ")
        return lines[0].removeprefix("mlxtune: error: ")


Cli = Callable[..., Outcome]


def unless_given(arguments: Sequence[object], **defaults: object) -> list[object]:
    """Return default options as arguments, without those that the arguments give."""
    names = {str(argument).partition("=")[0] for argument in arguments}
    flags = {"--" + name.replace("_", "-"): value for name, value in defaults.items()}
    return [each for name, value in flags.items() if name not in names for each in (name, value)]


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command in a separate process, as a user would."""
    command = [sys.executable, "-m", "mlxtune", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **options})


def finish(process: subprocess.Popen[str], read: str = "", timeout: float = 600) -> Outcome:
    """Wait for the process to end; `read` is the part of stderr that was read before."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Outcome(process.returncode, out, read + err)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read stderr up to the line that contains the text."""
    assert process.stderr is not None
    read = ""
    for line in process.stderr:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} was never printed:\n{read}")


def read_terminal(terminal: int) -> Iterator[str]:
    """Yield the output on a terminal, until its other end is closed."""
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # on Linux, the other end is closed
            return
        if not chunk:
            return
        yield chunk.decode(errors="replace")
