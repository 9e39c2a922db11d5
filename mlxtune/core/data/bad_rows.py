"""Rows that cannot be trained on: why, how many, and the first few of each reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxtune.core.data.notes import RowTally

TOO_DEEP = "JSON nested too deeply"


class BadRow(ValueError):
    """A row that cannot be trained on.

    `kind` is the reason that is counted, the same for all rows with the same problem; `detail` says
    where in the row.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind = kind
        self.detail = detail


@dataclass
class SkippedRows(RowTally):
    """The rows of one file that were skipped, by reason."""

    path: Path

    def add(self, row: int, problem: BadRow) -> None:
        """Count the row with this 1-based number."""
        self.count(row, problem.kind, problem.detail)

    @property
    def total(self) -> int:
        """How many rows were skipped."""
        return self.counts.total()

    @property
    def problems(self) -> dict[int, BadRow]:
        """The first few rows of each reason, by number, with their problem."""
        return {
            row: BadRow(kind, detail) for kind in self.places for row, detail in self.places[kind]
        }

    def warnings(self) -> Iterator[str]:
        """Yield `path:line: reason` for the first rows of each reason, then a count of others."""
        for kind, places in self.places.items():
            for row, detail in places:
                yield f"{self.path}:{row}: {BadRow(kind, detail)}; row skipped"
            if (more := self.counts[kind] - len(places)) > 0:
                yield f"{self.path}: {more} more rows skipped: {kind}"

    def first(self) -> str:
        """Return `path:line: reason` for the first row that was skipped."""
        row, problem = min(self.problems.items(), key=lambda item: item[0])
        return f"{self.path}:{row}: {problem}"


def json_type(value: Any) -> str:
    """Return the type of a JSON value in words, such as "a list"."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
