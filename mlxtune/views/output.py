"""Results on stdout: JSON for programs, and lines in which a terminal shows control characters."""

import json
import sys
from collections.abc import Callable
from typing import Any

from mlxtune.core.text import count
from mlxtune.errors import ConfigError, printable


def print_json(value: Any) -> None:
    """Print a JSON document. Raises ValueError for NaN and infinity, which JSON lacks."""
    # Half a document is worse than none.
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_line(line: str = "", *, stderr: bool = False, flush: bool = False) -> None:
    """Print a line, or several, with escapes for all other control characters."""
    print(printable(line), file=sys.stderr if stderr else sys.stdout, flush=flush)


def print_answer(text: str) -> None:
    """Print a piece of a model's answer as it arrives; nothing in it controls the terminal."""
    # Loads numpy, which doctor does without.
    from mlxtune.views.visible import escape_controls

    sys.stdout.write(escape_controls(text))
    sys.stdout.flush()


def render_lines(template: str, show: Callable[[Any], str], **values: Any) -> list[str]:
    """Return the lines of a text template of this folder; `show` makes a value of it text."""
    # Loaded by the commands that use it.
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("mlxtune", "views"),
        # All values go through `show`, and nothing through the escapes of HTML.
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(show(value)),
        line_statement_prefix="%",
    )
    environment.filters |= {"count": count, "number": "{:,}".format, "percent": "{:.1%}".format}
    return environment.get_template(template).render(values).split("\n")


def ask(question: str) -> bool:
    """Ask on a terminal for yes or no, which is the default. Raises ConfigError without one."""
    if not sys.stdin.isatty():
        raise ConfigError([f"{question} There is no terminal to ask on: add --yes"])
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
