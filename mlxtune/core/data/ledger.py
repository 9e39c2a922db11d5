"""The account of every row and every token of a file."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """The account of every row and every token of a file. It adds up:

    rows_read = rows_train + rows_validation + the sum of rows_skipped, and tokens =
    tokens_supervised + tokens_context + tokens_truncated.

    `rows_skipped` counts rows by reason, and `notes` counts rows by kind of note. `weight` says how
    often an epoch uses each training row; the counts ignore it.
    """

    path: str = ""
    rows_read: int = 0
    rows_train: int = 0
    rows_validation: int = 0
    rows_skipped: Counter[str] = field(default_factory=Counter)
    rows_truncated: int = 0
    examples: int = 0
    tokens: int = 0
    tokens_supervised: int = 0
    tokens_context: int = 0
    tokens_truncated: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    weight: float = 1.0

    @property
    def rows_kept(self) -> int:
        return self.rows_train + self.rows_validation

    def as_dict(self) -> dict[str, Any]:
        values = vars(self) | {
            "rows_skipped": dict(sorted(self.rows_skipped.items())),
            "notes": dict(sorted(self.notes.items())),
        }
        if self.weight == 1:
            del values["weight"]
        return values

    def adds_up(self) -> bool:
        rows = self.rows_kept + self.rows_skipped.total()
        seen = self.tokens_supervised + self.tokens_context + self.tokens_truncated
        return self.rows_read == rows and self.tokens == seen
