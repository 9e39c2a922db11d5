"""Work on a stranger's file, in a process that the system ends at its limits.

Libraries that read such a file may run forever or fill the memory, and nothing interrupts them in
the middle of an operation. A separate process can be killed at any time.

The process runs this file as a script, which therefore imports nothing of mlxtune. It runs another
one, with two functions: `prepare()` imports what is needed, before memory is limited, and
`serve(prepared, *arguments)` works until stdin is closed, as it is when the parent ends. Both ends
exchange lines.
"""

import os
import resource
import runpy
import select
import signal
import subprocess
import sys
from pathlib import Path

# Exit status of a process that ran out of memory.
_OUT_OF_MEMORY = 77
# How a process finds its own memory, to limit it itself: on Linux.
_STATM = Path("/proc/self/statm")
_LIMITS_ITSELF = _STATM.exists()
# Seconds between looks at the process's memory elsewhere.
_LOOK_EVERY = 0.2
_PIECE = 2**16


class TooMuchMemory(Exception):
    """The process has more memory than it may have."""


class LimitedProcess:
    """Runs a script that may take `memory` bytes beyond those of its imports."""

    def __init__(self, script: Path, memory: int, *arguments: str) -> None:
        self._memory = memory
        self._unread = bytearray()
        # -P: the modules beside a script have common names, and must not be found by them.
        command = [sys.executable, "-P", __file__, str(memory), str(script), *arguments]
        # Its own process group, as Ctrl-C is for the parent.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        self.pid = self._process.pid

    def write(self, lines: bytes) -> None:
        """Send lines. Those to a process that has ended are lost."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(lines)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reading shows the same

    def read_line(self, longest: int) -> bytes:
        """Return the next line, with its end; an incomplete one if it is longer or the last.

        Raises TooMuchMemory.
        """
        assert self._process.stdout is not None
        output, searched = self._process.stdout.fileno(), 0
        while (end := self._unread.find(b"\n", searched)) < 0 and len(self._unread) < longest:
            searched = len(self._unread)
            while not select.select([output], [], [], _LOOK_EVERY)[0]:
                self._check_memory()
            if not (piece := os.read(output, _PIECE)):
                break
            self._unread += piece
        size = min(end + 1 or len(self._unread), longest)
        line = bytes(self._unread[:size])
        del self._unread[:size]
        return line

    def why_ended(self) -> str:
        """Return `time`, `memory` or an exit status: why the process, which has ended, did."""
        status = self._process.wait()
        known = {-signal.SIGPROF: "time", _OUT_OF_MEMORY: "memory"}
        return known.get(status, f"exit status {status}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _check_memory(self) -> None:
        if not _LIMITS_ITSELF and resident_memory(self.pid) > self._memory:
            raise TooMuchMemory


def resident_memory(pid: int) -> int:
    """Return the bytes of memory that a process has in use, without what macOS has compressed."""
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    return int(subprocess.run(command, capture_output=True).stdout or 0) * 1024


# The process


def _limit_memory(size: int) -> None:
    """Make allocations beyond `size` bytes from now on raise MemoryError."""
    if not _LIMITS_ITSELF:
        return  # macOS has no such limit, so the parent watches
    pages = int(_STATM.read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main() -> None:
    """Run a script under the limit: `MEMORY SCRIPT [ARGUMENT…]`."""
    memory, script, *arguments = sys.argv[1:]
    functions = runpy.run_path(script)
    prepared = functions["prepare"]()
    _limit_memory(int(memory))
    # What libraries write when memory ends; the parent has a line of its own to say.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    try:
        functions["serve"](prepared, *arguments)
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
