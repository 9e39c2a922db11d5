"""Ctrl-C while the command's modules are imported, before it can handle one: a line, and no more.

`mlxtune/__init__.py` imports this before all else.
"""

import os
import signal
import sys
import threading
from types import FrameType

_LINE, _CODE = b"mlxtune: interrupted\n", 130


def is_command() -> bool:
    """Return whether this process was started as the command, and does not import it otherwise."""
    words = [*sys.orig_argv, "", ""]
    module = words[words.index("-m") + 1] if "-m" in words else ""
    return module == "mlxtune" or os.path.basename(sys.argv[0] if sys.argv else "") == "mlxtune"  # noqa: PTH119


def end_at_once(number: int, _: FrameType | None) -> None:
    """End the process: nothing has been begun."""
    os.write(2, _LINE)
    os._exit(_CODE)


def guard() -> None:
    """Have Ctrl-C end the process in a line, if it is the command."""
    main = threading.current_thread() is threading.main_thread()
    # Where SIGINT is ignored, as in the background, it stays so.
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_command() and main and default:
        signal.signal(signal.SIGINT, end_at_once)


def unguard() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


guard()
