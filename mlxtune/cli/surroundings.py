"""The current folder and the folder of temporary files, checked when a command starts."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from mlxtune.errors import OutputError

_TEMPORARY = ("TMPDIR", "TEMP", "TMP", "TEMPDIR")


def check_current_folder() -> None:
    """Raise OutputError if the current folder was deleted, or may not be read."""
    try:
        Path.cwd()
    except OSError as error:
        raise OutputError(
            f"the current folder cannot be read: {error.strerror}: change to another one with cd"
        ) from error


def set_temporary_folder() -> None:
    """Have MLX and child processes use the folder for temporary files that Python falls back to.

    Unlike Python, they fail where the environment names one that does not exist.
    """
    if any(name in os.environ for name in _TEMPORARY):
        # Without such a folder, the code that needs it reports the problem.
        with suppress(OSError):
            os.environ["TMPDIR"] = tempfile.gettempdir()
