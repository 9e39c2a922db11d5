"""The fate of every row and token, against a loop over rows and tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data import problems
from mlxtune.core.data.conversation import CHOSEN, REJECTED, Conversation, Pair
from mlxtune.core.data.encode import Example
from mlxtune.core.data.encoded_file import EncodedFile, ExampleArrays
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.data.problems import BadRowError, RowTally, SkippedRows
from mlxtune.core.data.template import RenderedText, Rendering, render_qwen3
from tests.core.data.encoding import converse, encode, encoded_file, words

Mask = list[int]


def encoded(rows: Sequence[tuple[int, list[Mask]]], path: str = "chat.jsonl") -> EncodedFile:
    examples = []
    for row, masks in rows:
        for mask in masks:
            tokens = np.arange(len(mask), dtype=np.int32)
            examples.append(Example(row, tokens, np.array(mask, dtype=np.uint8)))
    arrays = (
        ExampleArrays.of(examples) if examples else encoded_file(words(), render_qwen3, []).arrays
    )
    return EncodedFile(arrays, SkippedRows(Path(path)), RowTally())


def test_held_out_rows_do_not_train() -> None:
    file = encoded([(row, [[0, 1]]) for row in range(5)])
    ledger = file.truncate().ledger(rows_validation=2, weight=0.5, path="data")

    assert (ledger.rows_train, ledger.rows_validation, ledger.rows_kept) == (3, 2, 5)
    assert (ledger.path, ledger.weight) == ("data", 0.5)
    assert ledger.adds_up()


@pytest.mark.parametrize(
    "change",
    [
        *("rows_read", "rows_train", "rows_validation"),
        *("tokens", "tokens_supervised", "tokens_context", "tokens_truncated"),
    ],
)
def test_ledger_with_an_unaccounted_row_or_token_does_not_add_up(change: str) -> None:
    _, ledger, _ = encode(words(), converse(("user", "Hi"), ("assistant", "Hello")))
    assert ledger.adds_up()

    changed = replace(ledger, **{change: getattr(ledger, change) + 1})
    assert not changed.adds_up()


def test_ledger_does_not_add_up_with_a_row_skipped_that_was_never_read() -> None:
    assert not Ledger(rows_read=1, rows_train=1, rows_skipped=Counter({"odd": 1})).adds_up()


def test_ledger_is_ready_for_json_with_reasons_in_order() -> None:
    ledger = Ledger("a.jsonl", 3, 1, rows_skipped=Counter(b=1, a=1), notes=Counter(z=1, y=2))

    assert json.loads(json.dumps(ledger.as_dict())) == {
        "path": "a.jsonl",
        "rows_read": 3,
        "rows_train": 1,
        "rows_validation": 0,
        "rows_skipped": {"a": 1, "b": 1},
        "rows_truncated": 0,
        "examples": 0,
        "tokens": 0,
        "tokens_supervised": 0,
        "tokens_context": 0,
        "tokens_truncated": 0,
        "notes": {"y": 2, "z": 1},
    }
    assert list(ledger.as_dict()["rows_skipped"]) == ["a", "b"]


# Each example has a supervised token, like the examples that the encoder keeps.
MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=6).filter(any)
ROWS = st.dictionaries(st.integers(1, 20), st.lists(MASKS, min_size=1, max_size=3), max_size=6)


@settings(deadline=None)
@given(rows=ROWS, limit=st.integers(1, 8), unread=st.integers(0, 3))
def test_ledger_counts_equal_a_loop_over_rows(
    rows: dict[int, list[Mask]], limit: int, unread: int
) -> None:
    whole = encoded(list(rows.items()))
    for row in range(unread):
        whole.skipped.add(100 + row, BadRowError("not valid JSON"))

    file = whole.truncate(limit)
    ledger = file.ledger()

    kept, truncated, cut_answers, lost = [], [], [], {}
    counts = Counter({"tokens": 0, "supervised": 0, "context": 0, "examples": 0})
    for row, masks in rows.items():
        of_row = [mask[:limit] for mask in masks if any(mask[:limit])]
        counts["tokens"] += sum(map(len, masks))
        counts["supervised"] += sum(map(sum, of_row))
        counts["context"] += sum(map(len, of_row)) - sum(map(sum, of_row))
        counts["examples"] += len(of_row)
        if any(len(mask) > limit for mask in masks):
            truncated.append(row)
        if not of_row:
            lost[row] = masks[0].index(1) + 1
            continue
        kept.append(row)
        if sum(map(sum, of_row)) < sum(map(sum, masks)):
            cut_answers.append(row)
    reason = f"no supervised token within --max-seq-len {limit}"
    assert ledger == Ledger(
        path="chat.jsonl",
        rows_read=len(rows) + unread,
        rows_train=len(kept),
        rows_skipped=Counter({reason: len(lost), "not valid JSON": unread}),
        rows_truncated=len(truncated),
        examples=counts["examples"],
        tokens=counts["tokens"],
        tokens_supervised=counts["supervised"],
        tokens_context=counts["context"],
        tokens_truncated=counts["tokens"] - counts["supervised"] - counts["context"],
        notes=Counter({problems.TRUNCATED_ANSWER: len(cut_answers)}),
    )
    assert ledger.adds_up()
    assert [row for row, _ in file.notes.places.get(problems.TRUNCATED_ANSWER, [])] == cut_answers[
        :5
    ]
    assert (
        file.skipped.places.get(reason, [])
        == [
            (row, f"the answer starts at token {first}: raise the limit")
            for row, first in lost.items()
        ][:5]
    )


def test_file_truncated_twice_counts_each_row_once() -> None:
    file = encoded([(1, [[0, 1, 1]]), (2, [[0, 0, 0, 1]])])
    first, second = file.truncate(2), file.truncate(2)

    assert (first.skipped.total, first.notes.counts.total()) == (1, 1)
    assert first.ledger() == second.ledger()
    assert (file.skipped.total, file.notes.counts.total()) == (0, 0)


def test_ledger_includes_notes_added_later() -> None:
    file = encoded([(1, [[0, 1]])]).truncate(10)
    ledger = file.ledger()

    file.notes.count(1, problems.DUPLICATE)

    assert ledger.as_dict()["notes"] == {problems.DUPLICATE: 1}


def test_notes_are_counted_by_kind_and_the_first_rows_are_kept() -> None:
    found = RowTally()
    for row in range(1, 9):
        found.count(row, "odd", f"b{row}")
        found.count(row, "even")

    assert found.counts == Counter(odd=8, even=8)
    assert found.places == {
        "odd": [(row, f"b{row}") for row in range(1, 6)],
        "even": [(row, "") for row in range(1, 6)],
    }


def test_every_kind_of_note_has_its_advice_and_errors_are_among_them() -> None:
    kinds = {
        value for name, value in vars(problems).items() if name.isupper() and type(value) is str
    }

    assert set(problems.ADVICE) == kinds
    assert set(problems.ERRORS) <= kinds


def test_pairs_whose_answers_have_two_prompts_are_counted() -> None:
    """The template changes the prompt of one of the answers."""

    def template(conversation: Conversation) -> Rendering:
        *_, answer = conversation.messages
        prompt = "briefly: " if answer.content == "no" else "user: "
        text = RenderedText(
            prompt + answer.content, ((len(prompt), len(prompt) + len(answer.content)),)
        )
        return Rendering(conversation.row, (replace(text, role=conversation.role),))

    def pair(row: int, rejected: str) -> Pair:
        return Pair(
            *(
                replace(converse(("user", "Hi"), ("assistant", text), row=row), role=role)
                for text, role in (("yes", CHOSEN), (rejected, REJECTED))
            )
        )

    rows = [pair(1, "no"), pair(2, "nope"), pair(3, "no")]
    _, ledger, _ = encode(words(), *rows, template=template)

    assert (ledger.rows_train, ledger.examples) == (3, 6)
    assert ledger.as_dict()["notes"] == {problems.TWO_PROMPTS: 2}
