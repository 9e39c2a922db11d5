"""The account of every row and every token of a file."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxtune.core.data.conversation import ANSWER
from mlxtune.core.data.corpus import CutExamples, ExampleArrays
from mlxtune.core.data.problems import TRUNCATED_ANSWER, BadRow, RowTally, SkippedRows


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
        kept = self.rows_kept + self.rows_skipped.total()
        seen = self.tokens_supervised + self.tokens_context + self.tokens_truncated
        return self.rows_read == kept and self.tokens == seen


@dataclass
class EncodedFile:
    """One data file as examples before truncation, with the skipped rows and the notes.

    `answer_tokens_cut` counts the supervised tokens that truncation cut from kept rows.
    """

    arrays: ExampleArrays
    skipped: SkippedRows
    notes: RowTally
    answer_tokens_cut: int = 0

    def cut(self, max_seq_len: int | None = None, *, at: str = "end") -> CutExamples:
        """Cut every example to `max_seq_len` tokens, at its `end` or at its `start`.

        Call this once: it adds notes for truncated answers, and skips rows with no supervised
        token.
        """
        arrays, cut = self.arrays, self.arrays.cut(max_seq_len, at=at)
        kept_rows = cut.rows_kept
        lost = arrays.per_row(arrays.supervised - cut.supervised)
        self.answer_tokens_cut, cut_answers = int(lost[kept_rows].sum()), lost > 0
        for index in np.flatnonzero(~kept_rows):
            self._skip(int(index), cut)
        numbers = arrays.rows[arrays.first_of_row[:-1]]
        for row in numbers[kept_rows & cut_answers]:
            self.notes.count(int(row), TRUNCATED_ANSWER)
        return cut

    def ledger(
        self,
        cut: CutExamples,
        *,
        path: str | None = None,
        rows_validation: int = 0,
        weight: float = 1.0,
    ) -> Ledger:
        """Return the account of the file, once its examples are cut; its path is `path` if given.

        All rows that are kept train, except `rows_validation` rows.
        """
        arrays, kept = self.arrays, int(cut.rows_kept.sum())
        supervised = int(cut.supervised.sum())
        return Ledger(
            path=str(self.skipped.path) if path is None else path,
            rows_read=kept + self.skipped.total,
            rows_train=kept - rows_validation,
            rows_validation=rows_validation,
            rows_skipped=self.skipped.counts,
            rows_truncated=int(cut.rows_cut.sum()),
            examples=int((cut.supervised > 0).sum()),
            tokens=int(arrays.lengths.sum()),
            tokens_supervised=supervised,
            tokens_context=int(cut.lengths.sum()) - supervised,
            tokens_truncated=int(cut.cut.sum()),
            notes=self.notes.counts,
            weight=weight,
        )

    def _skip(self, index: int, cut: CutExamples) -> None:
        example = self.arrays.first_of_row[index]
        if self.arrays.roles[example] != ANSWER:
            examples = slice(example, self.arrays.first_of_row[index + 1])
            longest = int(self.arrays.lengths[examples].max())
            problem = BadRow(
                f"longer than --max-seq-len {cut.max_seq_len}",
                f"an answer to compare is not cut: raise the limit to {longest}",
            )
            self.skipped.add(int(self.arrays.rows[example]), problem)
            return
        end = self.arrays.ends[example]
        first = int(self.arrays.mask[end - self.arrays.lengths[example] : end].argmax()) + 1
        problem = BadRow(
            f"no supervised token within --max-seq-len {cut.max_seq_len}",
            f"the answer starts at token {first}: raise the limit",
        )
        self.skipped.add(int(self.arrays.rows[example]), problem)
