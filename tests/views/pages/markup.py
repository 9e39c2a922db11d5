"""Parses pages, and makes hostile values for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.runs import EVALUATION, as_lines, step_line, write_run

VOID = {"meta", "link", "input"}
INLINE = {"i", "b", "u", "code", "a", "span", "mark", "div", "script", "style"}
HOSTILE = "</script><script>owned()</script><img src=x onerror=alert(1)>\u202e\x1b[31m"
Attributes = dict[str, str]


def hostile(value: Any) -> Any:
    """Return the value with every text in it replaced by hostile text."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return {key: hostile(each) for key, each in value.items()} if isinstance(value, dict) else value


def hostile_run(folder: Path) -> Path:
    """Write a run whose every text is hostile."""
    run = write_run(folder / "<script>owned()<" / "x", evaluation=EVALUATION)
    evaluation = hostile(EVALUATION) | {"verdict": "helped"}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    about = json.loads((run / "run.json").read_text())
    options = {HOSTILE: HOSTILE, **about["config"]}
    about |= {"versions": {HOSTILE: HOSTILE}, "config": hostile(options), "device": HOSTILE}
    (run / "run.json").write_text(json.dumps(about))
    ledgers = json.loads((run / "ledger.json").read_text())
    ledgers[0] |= {"path": HOSTILE, "rows_skipped": {HOSTILE: 2}}
    (run / "ledger.json").write_text(json.dumps(ledgers))
    skipped = {"kind": "skipped", "step": 1, "reason": HOSTILE, "rows": [HOSTILE]}
    (run / "metrics.jsonl").write_bytes(as_lines([skipped, step_line(2, 9)]))
    return run


class Page(HTMLParser):
    """The parsed elements of a page, and their text. Every element must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, Attributes]] = []
        self._open: list[tuple[str, Attributes]] = []
        self._texts: list[tuple[list[tuple[str, Attributes]], str]] = []
        self.feed(html)
        self.close()
        assert not self._open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = tag, {name: value or "" for name, value in attrs}
        assert len(element[1]) == len(attrs)
        self.tags.append(element)
        if tag not in VOID:
            self._open.append(element)
        if tag not in VOID | INLINE:
            self._texts.append((list(self._open), " "))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, tag
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self._texts.append((list(self._open), data))

    def texts(self, wanted: Callable[[str, Attributes], bool]) -> list[str]:
        """Return the text of each element for which `wanted` is true."""
        found: dict[int, str] = {}
        for parents, data in self._texts:
            for element in parents:
                if wanted(*element):
                    found[id(element)] = found.get(id(element), "") + data
        return list(found.values())

    def of(self, name: str) -> list[str]:
        """Return the text of each element with this tag, class or id, in single-spaced words."""

        def named(tag: str, has: Attributes) -> bool:
            return name in (tag, has.get("id")) or name in has.get("class", "").split()

        return [" ".join(text.split()) for text in self.texts(named)]

    def text(self, name: str) -> str:
        return " ".join(self.of(name))
