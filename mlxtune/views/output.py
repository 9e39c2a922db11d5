"""Results on stdout: JSON for programs, and lines in which a terminal shows control characters."""

import json
import sys
from typing import Any

from mlxtune.errors import ConfigError, printable


def print_json(value: Any) -> None:
    """Print a JSON document. Raises ValueError for NaN and infinity, which JSON lacks."""
    # Half a document is worse than none.
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_line(line: str = "", *, stderr: bool = False) -> None:
    """Print a line, or several, with escapes for all other control characters."""
    print(printable(line), file=sys.stderr if stderr else sys.stdout)


def print_answer(text: str) -> None:
    """Print a piece of a model's answer as it arrives; nothing in it controls the terminal."""
    # Loads numpy, which doctor does without.
    from mlxtune.views.visible import escape_controls

    sys.stdout.write(escape_controls(text))
    sys.stdout.flush()


def ask(question: str) -> bool:
    """Ask on a terminal for yes or no, which is the default. Raises ConfigError without one."""
    if not sys.stdin.isatty():
        raise ConfigError([f"{question} There is no terminal to ask on: add --yes"])
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
