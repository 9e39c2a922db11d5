"""The helper of `processes.LimitedProcess`: limits its own memory, then runs a given script.

It imports nothing from mlxtune. The given script has two functions: `prepare()` imports the
necessary libraries before memory is limited, and `serve(prepared, *arguments)` does the work.
Parent and helper exchange lines. The helper ends with its parent, even while it works.
"""

import os
import resource
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

OUT_OF_MEMORY = 77  # exit status
_POLL_SECONDS = 0.5  # seconds
_STATM = Path("/proc/self/statm")
# macOS cannot limit memory, so the parent watches it.
HAS_MEMORY_LIMIT = _STATM.exists()


def _limit_memory(size: int) -> None:
    """Make later allocations beyond `size` bytes raise MemoryError."""
    pages = int(_STATM.read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def end_with(parent: int) -> None:
    """End this process and its group once its parent has ended, without running any cleanup."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Run a script under a memory limit; the command line is `MEMORY SCRIPT [ARGUMENT…]`."""
    memory, script, *arguments = sys.argv[1:]
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    functions = runpy.run_path(script)
    prepared = functions["prepare"]()
    if HAS_MEMORY_LIMIT:
        _limit_memory(int(memory))
    # Drop what libraries print when memory runs out: the parent reports this fault in one line.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        functions["serve"](prepared, *arguments)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
