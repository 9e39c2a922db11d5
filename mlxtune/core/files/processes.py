"""Helper processes: in separate sessions, limited, and ended with all their descendants."""

import math
import os
import secrets
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
_DEVNULL = subprocess.DEVNULL
_PACKAGE = Path(__file__).resolve().parents[3]
_POLL_SECONDS = 0.005
# Seconds between checks of a process's memory, if the process cannot limit it.
_MEMORY_POLL_SECONDS = 0.2
_PIECE_BYTES = 2**16
# The most pieces of messages to pass on after a reply, because a thread may print forever.
_LAST_PIECES = 64
# Seconds in which a process ends after it has closed its output, and its descendants after it.
_END_SECONDS = 2.0
# The variable that marks a helper and its descendants.
_MARK = "MLXTUNE_HELPER"


class HelperError(MlxTuneError):
    """A process ended unexpectedly."""


class HelperTimeoutError(HelperError):
    """A process did not end in time."""


class ProcessEndedError(Exception):
    """A limited process ended before it answered, or its answer or memory is too large.

    `reason` is `time`, `memory`, `length`, `closed` for its output, or an exit status.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def start(
    command: Sequence[str],
    *,
    stdin: Stream = _DEVNULL,
    stdout: Stream = _DEVNULL,
    stderr: Stream | None = _DEVNULL,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    new_session: bool = True,
) -> Process:
    """Start a process.

    Ctrl-C reaches only this process, which must `end` the helper. Without `new_session`, Ctrl-C
    reaches both processes, and the helper inherits open files. Raises OSError.
    """
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=environment,
        start_new_session=new_session,
        close_fds=new_session,
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
    # Without `new_session`, Python starts a program given by its path with posix_spawn, not with
    # fork, which copies the page tables of a training process.
    with start(
        command, stdout=PIPE, stderr=PIPE, environment=environment, new_session=False
    ) as process:
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

    A script that runs a user's code has `on_message`, which gets the output on stderr while a line
    is read, and adds `variables` to the environment. Its daemons end with it.
    """

    def __init__(
        self,
        script: Path,
        memory: int,
        *arguments: str,
        on_message: Callable[[bytes], None] | None = None,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._memory = memory
        self._unread = bytearray()
        self._unsent = memoryview(b"")
        self._on_message = on_message
        # Processes know the time of their start to a hundredth of a second.
        self._mark, self._since = secrets.token_hex(16), time.time() - 1
        command = python(limited_helper.__file__, str(memory), str(script), *arguments)
        try:
            self._process = start(
                command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=None if on_message is None else PIPE,
                folder=folder,
                environment={**os.environ, **(variables or {}), _MARK: self._mark},
            )
        except OSError as error:
            raise HelperError(
                f"a helper process cannot be started: {error.strerror}: close other programs, or "
                "allow more processes with ulimit -u"
            ) from error
        self.pid = self._process.pid
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._messages = self._process.stderr
        self._readable = [each for each in (self._output, self._messages) if each is not None]

    def write(self, lines: bytes) -> None:
        """Send lines. They are lost if the process has ended."""
        with suppress(BrokenPipeError):  # the next read reports that the process ended
            self._input.write(lines)
            self._input.flush()

    def read_line(self, longest: int, *, sending: bytes = b"", seconds: float = math.inf) -> bytes:
        """Return the next line with its line end, of at most `longest` bytes.

        Send lines meanwhile, as far as the process reads them. Raises ProcessEndedError if there is
        no such line, or none within `seconds`.
        """
        deadline, searched = time.monotonic() + seconds, 0
        self._unsent = memoryview(sending)
        while (end := self._unread.find(b"\n", searched)) < 0 and len(self._unread) < longest:
            searched = len(self._unread)
            if self._has_output(deadline):
                if not (piece := os.read(self._output.fileno(), _PIECE_BYTES)):
                    break
                self._unread += piece
        size = min(end + 1 or len(self._unread), longest)
        line = bytes(self._unread[:size])
        del self._unread[:size]
        self._pass_on(_LAST_PIECES)
        if not line.endswith(b"\n"):
            raise ProcessEndedError("length" if size == longest else self.why_ended())
        return line

    def _has_output(self, deadline: float) -> bool:
        """Wait a moment, send and pass messages on; return whether output can be read.

        Raises ProcessEndedError.
        """
        left = max(deadline - time.monotonic(), 0)
        sinks = [self._input] if self._unsent else []
        ready, writable, _ = select.select(
            self._readable, sinks, [], min(_MEMORY_POLL_SECONDS, left)
        )
        if writable:
            self._send()
        if self._messages in ready:
            self._pass_on(1)
        if self._output in ready:
            return True
        if not left:
            raise ProcessEndedError("time")
        if not ready and not writable:
            self._check()
        return False

    def _send(self) -> None:
        try:
            # A pipe that is ready takes this many bytes without blocking.
            piece = self._unsent[: select.PIPE_BUF]
            self._unsent = self._unsent[os.write(self._input.fileno(), piece) :]
        except BrokenPipeError:  # reading reports that the process ended
            self._unsent = memoryview(b"")

    def _pass_on(self, most: int) -> None:
        """Pass on what the process wrote to stderr, at most `most` pieces."""
        for _ in range(most):
            if self._messages not in self._readable or not _is_ready(self._messages):
                return
            assert self._messages is not None and self._on_message is not None
            if piece := os.read(self._messages.fileno(), _PIECE_BYTES):
                self._on_message(piece)
            else:
                self._readable.remove(self._messages)

    def _check(self) -> None:
        """Raise ProcessEndedError if the process takes too much memory, or has ended.

        Its descendants may keep its output open.
        """
        if not limited_helper.HAS_MEMORY_LIMIT and resident_memory(self.pid) > self._memory:
            raise ProcessEndedError("memory")
        if self._process.poll() is not None and not _is_ready(self._output):
            self._pass_on(_LAST_PIECES)
            raise ProcessEndedError(self.why_ended())

    def why_ended(self) -> str:
        """Return why the process ended or closed its output, as ProcessEndedError lists it."""
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed"
        reasons = {-signal.SIGPROF: "time", limited_helper.OUT_OF_MEMORY: "memory"}
        return reasons.get(status, f"exit status {status}")

    def close(self) -> None:
        end(self._process)
        if self._on_message is not None:
            end_marked(self._mark, self._since)


def _is_ready(stream: IO[bytes]) -> bool:
    return bool(select.select([stream], [], [], 0)[0])


def end_marked(mark: str, since: float) -> None:
    """Kill the descendants of a helper, started at `since`, that have left its session."""
    import psutil

    deadline = time.monotonic() + _END_SECONDS
    remain = True
    # Processes may fork while the others are listed.
    while remain and time.monotonic() < deadline:
        remain = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                environment = process.environ()
                if environment.get(_MARK) == mark:
                    process.kill()
                    remain = True
                elif not environment and process.create_time() >= since:
                    # A program that is just being loaded has no environment yet.
                    remain |= process.status() != psutil.STATUS_ZOMBIE
        time.sleep(_POLL_SECONDS * remain)


def resident_memory(pid: int) -> int:
    """Return how many bytes a process has in memory, not counting memory that macOS compressed."""
    import psutil

    with suppress(psutil.Error):  # the process has ended
        return int(psutil.Process(pid).memory_info().rss)
    return 0
