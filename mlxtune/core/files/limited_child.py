"""Limits its own memory and runs another script: the script of processes.LimitedProcess.

It imports nothing of mlxtune. The other script has two functions: `prepare()` imports what is
needed, before memory is limited, and `serve(prepared, *arguments)` works until stdin is closed, as
it is when the parent ends. Both ends exchange lines.
"""

import os
import resource
import runpy
import sys
from pathlib import Path

OUT_OF_MEMORY = 77  # exit status
_STATM = Path("/proc/self/statm")
# macOS has no limit of memory, so the parent watches.
LIMITS_ITSELF = _STATM.exists()


def _limit_memory(size: int) -> None:
    """Make allocations beyond `size` bytes from now on raise MemoryError."""
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
    if LIMITS_ITSELF:
        _limit_memory(int(memory))
    # Libraries complain when memory ends; the parent reports it in one line.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    try:
        functions["serve"](prepared, *arguments)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
