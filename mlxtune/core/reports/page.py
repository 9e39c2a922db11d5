"""What all pages are: one file that needs no network, in which nothing of the data acts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from mlxtune.core.machine.files import as_output_error
from mlxtune.errors import OutputError

# Of a page, where it says what wrote it.
_START = 4096


@dataclass(frozen=True)
class Kind:
    """The pages of one command. `start` is the section to skip to, `icon` shapes of 16 by 16.

    `styles` and `script` are files here, beside those that all pages have.
    """

    command: str
    start: str
    icon: str
    script: str
    styles: tuple[str, ...] = ()

    def render(
        self, *, title: str, header: str, links: Iterable[tuple[str, str]], main: str
    ) -> str:
        """Return a page, which encodes to UTF-8; `links` are the names of sections and titles.

        Its only script and style are allowed by their hash.
        """
        styles = "".join(map(read_part, ("page.css", *self.styles)))
        scripts = read_part("page.js") + read_part(self.script)
        return Template(read_part("page.html")).substitute(
            command=self.command,
            start=self.start,
            icon=self.icon.replace("<", "%3C").replace(">", "%3E").replace("#", "%23"),
            style=styles,
            style_hash=_hash(styles),
            script=scripts,
            script_hash=_hash(scripts),
            title=title,
            header=header,
            nav="".join(f'<a href="#{name}">{text}</a>' for name, text in links),
            main=main,
        )

    def check_replaceable(self, target: Path, option: str) -> None:
        """Raise OutputError where a page, named by `option`, would replace another kind of file."""
        with as_output_error(target, option):
            if target.exists() and not self._is_own(target):
                raise OutputError(
                    f"{target}: is no page of mlxtune {self.command}: name another with {option}"
                )

    def _is_own(self, target: Path) -> bool:
        """Tell whether a file is a page of this kind, or empty."""
        with target.open(encoding="utf-8", errors="replace") as file:
            start = file.read(_START)
        return not start or f'<meta name="generator" content="mlxtune {self.command}">' in start


def read_part(name: str) -> str:
    """Return a file that pages are made of."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
