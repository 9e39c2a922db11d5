"""Helper processes: in separate sessions, limited, and ended with all their descendants."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mlxtune.core.files import limited_helper
from mlxtune.core.files.reading import read_bytes
from mlxtune.core.files.writing import make_folder, open_to_write
from mlxtune.errors import MlxTuneError

Process = subprocess.Popen[bytes]
Stream = int | IO[bytes]
PIPE = subprocess.PIPE
_NOWHERE = subprocess.DEVNULL
_PACKAGE = Path(__file__).resolve().parents[3]
_POLL_SECONDS = 0.005
# Seconds between checks of a process's memory, if the process cannot limit it.
_LOOK_EVERY = 0.2
_PIECE = 2**16


class HelperError(MlxTuneError):
    """A process ended unexpectedly."""


class HelperTimeoutError(HelperError):
    """A process did not end in time."""


class ProcessEnded(Exception):
    """A limited process ended before it answered, or its answer or memory is too large.

    `reason` is `time`, `memory`, `length` or an exit status.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def start(
    command: Sequence[str],
    *,
    stdin: Stream = _NOWHERE,
    stdout: Stream = _NOWHERE,
    stderr: Stream | None = _NOWHERE,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    apart: bool = True,
) -> Process:
    """Start a process.

    Ctrl-C reaches only this process, which must `end` the helper. Without `apart`, Ctrl-C reaches
    both processes, and the helper inherits open files. Raises OSError.
    """
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=environment,
        start_new_session=apart,
        close_fds=apart,
    )


def end(process: Process) -> None:
    """Kill a process and its children, and close its pipes."""
    # Closing flushes lines that the helper never read.
    with suppress(BrokenPipeError), process:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # macOS refuses to signal a group of zombies.
            process.kill()


@dataclass(frozen=True)
class Output:
    """The result of a process: its exit status, below 0 for a signal, and its output."""

    status: int
    stdout: str
    stderr: str


def output_of(
    command: Sequence[str],
    seconds: float | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Output:
    """Run a process to its end. Raises OSError, and HelperTimeoutError after `seconds`."""
    # Without `apart`, Python starts a program given by its path with posix_spawn, not with fork,
    # which copies the page tables of a training process.
    with start(command, stdout=PIPE, stderr=PIPE, environment=environment, apart=False) as process:
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise HelperTimeoutError(f"no answer within {seconds:.0f} seconds") from None
        finally:
            process.kill()
    texts = (each.decode(errors="replace") for each in (stdout, stderr))
    return Output(process.returncode, *texts)


def python(*arguments: str) -> list[str]:
    """Return the command line of Python, which imports nothing from the current folder."""
    # -P: modules in the current folder, or next to a script, would shadow others.
    return [sys.executable, "-P", *arguments]


def own_environment(**variables: str) -> dict[str, str]:
    """Return an environment in which a helper imports this copy of the package."""
    paths = (str(_PACKAGE), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(path for path in paths if path)
    return {**os.environ, "PYTHONPATH": path, **variables}


@dataclass(frozen=True)
class Helpers:
    """Starts Python with this package; all temporary files go to `scratch`.

    Processes that run longer than `limit` seconds are killed.
    """

    scratch: Path
    limit: float = 300.0

    def call(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        variables: Mapping[str, str] | None = None,
        until: Callable[[], bool] = lambda: False,
        stop: signal.Signals = signal.SIGKILL,
    ) -> int:
        """Run Python in a folder, made if missing; write its output there, and return the status.

        Once `until` returns true, the process gets the signal `stop`. Raises HelperTimeoutError if
        the process takes too long. The process and its children always end with this call.
        """
        make_folder(folder)
        with open_to_write(folder / "stdout") as out, open_to_write(folder / "stderr") as errors:
            process = start(
                python(*arguments),
                stdout=out,
                stderr=errors,
                folder=folder,
                environment=own_environment(TMPDIR=str(self.scratch), **(variables or {})),
            )
            deadline, stopped = time.monotonic() + self.limit, False
            try:
                while process.poll() is None:
                    if not stopped and until():
                        process.send_signal(stop)
                        stopped = True
                    if time.monotonic() > deadline:
                        raise HelperTimeoutError(f"did not end within {self.limit:.0f} seconds")
                    time.sleep(_POLL_SECONDS)
                return process.returncode
            finally:
                end(process)


def describe_end(status: int, folder: Path) -> str:
    how = f"killed by signal {-status}" if status < 0 else f"exit code {status}"
    lines = read_bytes(folder / "stderr").decode(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last}" if last else how


class LimitedProcess:
    """Runs a script that may take `memory` bytes in addition to the memory of its imports.

    Libraries that read an untrusted file may run forever or exhaust memory, and cannot be
    interrupted in the middle of an operation. A separate process can be killed at any time.
    `limited_helper.py` describes the script. Raises HelperError if the process cannot be started.
    """

    def __init__(self, script: Path, memory: int, *arguments: str) -> None:
        self._memory = memory
        self._unread = bytearray()
        command = python(limited_helper.__file__, str(memory), str(script), *arguments)
        try:
            self._process = start(command, stdin=PIPE, stdout=PIPE, stderr=None)
        except OSError as error:
            raise HelperError(
                f"a helper process cannot be started: {error.strerror}: close other programs, or "
                "allow more processes with ulimit -u"
            ) from error
        self.pid = self._process.pid

    def write(self, lines: bytes) -> None:
        """Send lines. They are lost if the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the next read reports that the process ended
            self._process.stdin.write(lines)
            self._process.stdin.flush()

    def read_line(self, longest: int) -> bytes:
        """Return the next line with its line end, of at most `longest` bytes.

        Raises ProcessEnded if there is no such line.
        """
        assert self._process.stdout is not None
        output, searched = self._process.stdout.fileno(), 0
        while (end := self._unread.find(b"\n", searched)) < 0 and len(self._unread) < longest:
            searched = len(self._unread)
            while not select.select([output], [], [], _LOOK_EVERY)[0]:
                if not limited_helper.LIMITS_ITSELF and resident_memory(self.pid) > self._memory:
                    raise ProcessEnded("memory")
            if not (piece := os.read(output, _PIECE)):
                break
            self._unread += piece
        size = min(end + 1 or len(self._unread), longest)
        line = bytes(self._unread[:size])
        del self._unread[:size]
        if not line.endswith(b"\n"):
            raise ProcessEnded("length" if size == longest else self.why_ended())
        return line

    def why_ended(self) -> str:
        """Return the reason why the process has ended: `time`, `memory` or an exit status."""
        status = self._process.wait()
        known = {-signal.SIGPROF: "time", limited_helper.OUT_OF_MEMORY: "memory"}
        return known.get(status, f"exit status {status}")

    def close(self) -> None:
        end(self._process)


def resident_memory(pid: int) -> int:
    """Return how many bytes a process has in memory, not counting memory that macOS compressed."""
    import psutil

    with suppress(psutil.Error):  # the process has ended
        return int(psutil.Process(pid).memory_info().rss)
    return 0
