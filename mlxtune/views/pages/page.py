"""The frame of all pages: one HTML file that loads nothing and never runs data as code.

Templates are in `templates/`. All values are escaped, including invisible characters; only markup
rendered by this package is inserted unchanged.
"""

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.writing import as_output_error
from mlxtune.core.formatting import byte_size, duration, loss_text, pluralize, signed_loss
from mlxtune.errors import OutputError
from mlxtune.views import visible
from mlxtune.views.parts import SIGNS, STYLES, ledger_sums

# A page names its generator within this many bytes.
_START = 4096


@dataclass(frozen=True)
class PageType:
    """The pages of one command.

    `styles` and `scripts` are files in `templates/` besides those of all pages. `package` contains
    the pages' own templates, and `connects` lists the addresses that their script fetches.
    """

    command: str
    scripts: tuple[str, ...]
    styles: tuple[str, ...] = ()
    package: str = __package__
    connects: str = ""

    def render(self, template: str, **context: Any) -> str:
        """Return a page made from a template that extends page.html.

        Its content security policy allows only the page's script and style, by their hashes.
        """
        style = "".join(asset(name, self.package) for name in ("page.css", *self.styles))
        script = "".join(asset(name, self.package) for name in ("page.js", *self.scripts))
        page = self.fragment(
            template,
            page=self,
            style=Markup(style),
            style_hash=_hash(style),
            script=Markup(script),
            script_hash=_hash(script),
            **context,
        )
        return str(page)

    def fragment(self, template: str, **context: Any) -> Markup:
        """Return a filled template of this page's package, or of this folder."""
        return render(template, self.package, **context)

    def check_replaceable(self, target: Path, option: str) -> None:
        """Raise OutputError if the page named by `option` would replace another kind of file."""
        with as_output_error(target, option):
            if target.exists() and not self._is_own(target):
                raise OutputError(
                    f"{target} is not a page of mlxtune {self.command}: choose another file "
                    f"with {option}"
                )

    def _is_own(self, target: Path) -> bool:
        """Return whether a file is a page of this type, or empty."""
        with open_regular(target) as file:
            start = file.read(_START).decode(errors="replace")
        return not start or f'<meta name="generator" content="mlxtune {self.command}">' in start


def render(template: str, package: str = __package__, **context: Any) -> Markup:
    """Return a filled template from `templates/` of this or another package."""
    return Markup(_environment(package).get_template(template).render(context))


@cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(__package__)]),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "answer": visible.without_template_tokens,
        "bytes": lambda size: None if size is None else byte_size(size),
        "count": pluralize,
        "duration": lambda seconds: None if seconds is None else duration(seconds),
        "loss": loss_text,
        "multiline": _multiline,
        "number": number_text,
        "percent": percent,
        "sign": SIGNS.__getitem__,
        "signed": signed_loss,
        "style": STYLES.__getitem__,
        "sums": ledger_sums,
    }
    return environment


def _shown(value: Any) -> Any:
    """Return a value with invisible characters escaped; markup stays, and None becomes a dash."""
    if isinstance(value, Markup):
        return value
    return "–" if value is None else visible.escape(str(value))


def _multiline(text: str) -> Markup:
    """Escape text except for its newlines."""
    return Markup("\n").join(map(visible.escape, text.split("\n")))


def number_text(value: float | None, spec: str = ",") -> str | None:
    return None if value is None else format(value, spec)


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def asset(name: str, package: str = __package__) -> str:
    environment = _environment(package)
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
