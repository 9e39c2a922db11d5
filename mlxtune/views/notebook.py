"""A line in a Jupyter notebook that is replaced in place, as a terminal's bar is."""

import math
import sys
import time
from html import escape
from typing import Any

from mlxtune.core.text import duration

# Each change is a message to the browser.
_SECONDS_BETWEEN = 0.1


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel, which has imported IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class LiveLine:
    """Shows a text and, if given, how much of the work is done and how long the rest will take."""

    def __init__(self) -> None:
        from IPython.display import display

        self._shown = -math.inf
        self._first: tuple[float, float] | None = None
        self._handle = display(_content(""), raw=True, display_id=True)

    def update(self, text: str, share: float | None = None) -> None:
        """Replace what is shown, unless it has been replaced just now."""
        now = time.monotonic()
        if now - self._shown < _SECONDS_BETWEEN:
            return
        self._shown = now
        if share is not None:
            self._first = self._first or (now, share)
            started, before = self._first
            if share > before:
                text += f"  {duration((now - started) * (1 - share) / (share - before))} left"
        self._handle.update(_content(text, share), raw=True)

    def close(self) -> None:
        """Remove the line."""
        self._handle.update(_content(""), raw=True)


def _content(text: str, share: float | None = None) -> dict[str, Any]:
    bar = "" if share is None else f'<progress max="1" value="{share:.4f}"></progress> '
    html = f'<div style="font-family: monospace">{bar}{escape(text)}</div>' if text else ""
    return {"text/plain": text, "text/html": html}
