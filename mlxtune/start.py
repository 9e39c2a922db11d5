"""Handles Ctrl-C with a one-line message while the command's modules are still being imported.

`mlxtune/__init__.py` imports this module first.
"""

import os
import signal
import sys
import threading
from types import FrameType

_LINE, _CODE = b"mlxtune: interrupted\n", 130


def is_command() -> bool:
    """Return whether this process was started as the `mlxtune` command."""
    words = [*sys.orig_argv, "", ""]
    module = words[words.index("-m") + 1] if "-m" in words else ""
    return module == "mlxtune" or os.path.basename(sys.argv[0] if sys.argv else "") == "mlxtune"  # noqa: PTH119


def end_at_once(number: int, _: FrameType | None) -> None:
    """Print one line and end the process, which has not started any work."""
    os.write(2, _LINE)
    os._exit(_CODE)


def guard() -> None:
    """Make Ctrl-C end the process with one line, if the process is the `mlxtune` command."""
    main = threading.current_thread() is threading.main_thread()
    # An ignored SIGINT, as in a background job, stays ignored.
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_command() and main and default:
        signal.signal(signal.SIGINT, end_at_once)


def unguard() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


guard()
