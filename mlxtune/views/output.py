"""Prints results on stdout: JSON for programs, and lines with control characters escaped.

Values may have line breaks, which must not start a line that looks like the command's own. So a
line is printed as one line, and text of several lines is split before values are put into it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlxtune.core.formatting import pluralize
from mlxtune.errors import ConfigError, printable

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table


def print_json(value: Any) -> None:
    """Print a JSON document. Raises ValueError for NaN and infinity, which JSON lacks."""
    # Build the whole document first, because half a document is worse than none.
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_line(line: str = "", *, stderr: bool = False, flush: bool = False) -> None:
    """Print one line; line breaks in it and other control characters are escaped."""
    print(printable(line), file=sys.stderr if stderr else sys.stdout, flush=flush)


def print_answer(text: str, *, stderr: bool = False) -> None:
    """Print a piece of an answer, or of other output, as it arrives; escape terminal controls."""
    # This import loads numpy, which doctor does not need.
    from mlxtune.views.visible import escape_controls

    print(escape_controls(text), end="", file=sys.stderr if stderr else sys.stdout, flush=True)


class AnswerConsole:
    """Prints one answer as it arrives, or several side by side (in a pipe, one after another)."""

    def __init__(self, names: Sequence[str]) -> None:
        self._texts = dict.fromkeys(names, "")
        self._live: Live | None = None
        if len(names) > 1:
            # Load rich only to compare several answers.
            from rich.console import Console
            from rich.live import Live

            self._console = Console(highlight=False)
            if self._console.is_terminal:
                self._live = Live(
                    console=self._console, get_renderable=self._columns, transient=True
                )
                self._live.start()

    def add(self, name: str, text: str) -> None:
        """Add text to the named answer; print the text at once if it is the only answer."""
        self._texts[name] += text
        if len(self._texts) == 1:
            print_answer(text)

    def close(self) -> None:
        """Print what is left of the answers, and end the line."""
        if self._live is not None:
            self._live.stop()
            self._console.print(self._columns())
        elif len(self._texts) == 1:
            print_line()
        else:
            for name, text in self._texts.items():
                print_answer(f"{name}: {text}\n")

    def _columns(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        from mlxtune.views.visible import escape_controls

        table = Table(box=None, expand=True, padding=(0, 2, 0, 0), show_header=True)
        for name in self._texts:
            table.add_column(name, ratio=1, overflow="fold")
        table.add_row(*(Text(escape_controls(text)) for text in self._texts.values()))
        return table


def render_lines(template: str, show: Callable[[str], str], **values: Any) -> list[str]:
    """Fill a text template of this folder; `show` marks up the text of a value, one line."""
    # Load Jinja only in commands that need it.
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    from mlxtune.views.visible import escape

    environment = Environment(
        loader=PackageLoader("mlxtune", "views"),
        # `show` replaces the HTML escapes of all values.
        autoescape=True,
        finalize=lambda value: (
            value if isinstance(value, Markup) else Markup(show(escape(str(value))))
        ),
        line_statement_prefix="%",
    )
    environment.filters |= {"count": pluralize, "number": "{:,}".format, "percent": "{:.1%}".format}
    return environment.get_template(template).render(values).split("\n")


def ask(question: str) -> bool:
    """Return whether the user says yes, by default no. Raises ConfigError without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError([f"{question} There is no terminal to ask on: add --yes"])
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
