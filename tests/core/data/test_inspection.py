"""The numbers of an inspection against loops over rows, and the rows that it shows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.conversation import CHOSEN, DESIRABLE, REJECTED, WHOLE
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.data.encoded_file import EncodedFile, ExampleArrays
from mlxtune.core.data.findings import Finding, Place
from mlxtune.core.data.inspection import (
    Cost,
    Distribution,
    InspectedExamples,
    LengthLimit,
    Piece,
    ShownExample,
    ShownPair,
    TruncationReport,
    limits,
    text_pieces,
    together,
    truncation_report,
)
from mlxtune.core.data.problems import RowTally, SkippedRows
from tests.core.data.encoding import ByteTokenizer, converse, encode, words
from tests.inspections import INSPECTION

Rows = Sequence[tuple[int, Sequence[Sequence[int]]]]


def examined(
    files: list[EncodedFile], limit: int | None, validates: list[int]
) -> InspectedExamples:
    cuts = [file.arrays.truncate(limit) for file in files]
    corpus = Corpus(cuts, [str(file.skipped.path) for file in files])
    return InspectedExamples([corpus], validates)


def example(row: int, mask: Sequence[int]) -> Example:
    return Example(row, np.arange(len(mask), dtype=np.int32), np.array(mask, dtype=np.uint8))


def encoded(rows: Rows, name: str = "a.jsonl") -> EncodedFile:
    """Return rows as if encoded; each row has a number and the masks of its examples."""
    arrays = ExampleArrays.of([example(row, mask) for row, masks in rows for mask in masks])
    return EncodedFile(arrays, SkippedRows(Path(name)), RowTally())


# Distributions


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300))
def test_percentile_is_the_least_value_at_that_rank(values: list[int]) -> None:
    found = Distribution.of(np.array(values, dtype=np.int64))

    for percent, value in ((50, found.p50), (95, found.p95)):
        enough = [v for v in values if 100 * sum(o <= v for o in values) >= percent * len(values)]
        assert value == min(enough)
    assert (found.max, found.total) == (max(values), sum(values))
    assert found.mean == pytest.approx(sum(values) / len(values))


def test_distribution_of_no_values_is_zero() -> None:
    assert Distribution.of(np.zeros(0, dtype=np.int64)) == Distribution(0, 0, 0, 0.0, 0)


# Limits

MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=9).filter(any)
ROWS = st.dictionaries(
    st.integers(1, 9), st.lists(MASKS, min_size=1, max_size=3), min_size=1, max_size=5
).map(lambda rows: list(rows.items()))


@settings(deadline=None)
@given(files=st.lists(ROWS, max_size=3), current=st.integers(1, 10))
def test_truncated_tokens_equal_a_loop_over_rows(
    files: list[list[tuple[int, list[list[int]]]]], current: int
) -> None:
    (found,) = limits([encoded(rows) for rows in files], current, "end")

    expected = {"rows_cut": 0, "rows_lost": 0, "tokens_cut": 0, "supervised_cut": 0}
    for _, masks in (row for rows in files for row in rows):
        kept = [mask[:current] if any(mask[:current]) else [] for mask in masks]
        expected["rows_cut"] += kept != masks
        expected["rows_lost"] += not any(kept)
        expected["tokens_cut"] += sum(map(len, masks)) - sum(map(len, kept))
        expected["supervised_cut"] += sum(map(sum, masks)) - sum(map(sum, kept))
    assert found == LengthLimit(current, **expected)
    for file, rows in zip([encoded(rows) for rows in files], files, strict=True):
        truncated = file.truncate(current)
        assert truncated.ledger().rows_kept == len(rows) - truncated.skipped.total


@pytest.mark.parametrize(
    ("longest", "current", "sizes"),
    [
        (1, 512, [512]),
        (64, 512, [512]),
        (65, 512, [128, 512]),
        (128, 512, [128, 512]),
        (129, 256, [128, 256]),
        (1000, 300, [128, 256, 300, 512, 1024]),
        (1025, 64, [64, 128, 256, 512, 1024, 2048]),
    ],
)
def test_limits_are_powers_of_two_up_to_the_longest_row(
    longest: int, current: int, sizes: list[int]
) -> None:
    # Each limit cuts more rows than the limit before it.
    lengths = [size + 1 for size in sizes if size < longest]
    rows = [(i, [[1] * min(length, longest)]) for i, length in enumerate([*lengths, longest], 1)]
    found = limits([encoded(rows), encoded([(1, [[1]])])], current, "end")

    assert [one.max_seq_len for one in found] == sizes
    for one in found:
        assert one.rows_cut == sum(len(mask) > one.max_seq_len for _, (mask,) in rows)


def test_among_equal_limits_the_shortest_and_current_are_shown() -> None:
    found = limits([encoded([(1, [[1] * 5000]), (2, [[1] * 200])])], 1024, "end")

    assert [one.max_seq_len for one in found] == [128, 256, 1024, 8192]
    assert [one.rows_cut for one in found] == [2, 1, 1, 0]


def test_limits_of_no_files_are_the_current_one() -> None:
    assert limits([], 512, "end") == (LengthLimit(512, 0, 0, 0, 0),)


# Examples

TRAIN = [encoded([(1, [[0, 1]]), (4, [[0, 1, 1], [0, 0, 0, 1]])]), encoded([(4, [[1]])], "b.jsonl")]
VALIDATION = [encoded([(4, [[0, 1] * 3]), (9, [[0, 1]])], "v.jsonl")]


def examples(held_out: Sequence[int] = (), *, validates: bool = True) -> InspectedExamples:
    files = [*TRAIN, *VALIDATION] if validates else TRAIN
    return examined(
        files,
        3,
        [3, 4] if validates else held_out,
    )


def test_lengths_and_supervised_tokens_are_before_the_cut() -> None:
    # The second example of a.jsonl:4 has no supervised token within three tokens.
    found = examples()

    assert len(found) == 5
    assert len(found.lengths) == 6
    assert found.lengths.tolist() == [2, 3, 4, 1, 6, 2]
    assert found.supervised.tolist() == [1, 2, 1, 1, 3, 1]


def test_cost_counts_the_rows_that_train_and_the_tokens_after_the_cut() -> None:
    assert examples().cost(2) == Cost(2, 6, 4, 5)
    assert examples([1], validates=False).cost(1) == Cost(2, 3, 2, 3)
    assert examples([0, 2], validates=False).cost(8) == Cost(1, 3, 2, 3)


@settings(deadline=None)
@given(rows=ROWS, data=st.data(), batch_size=st.integers(1, 4), limit=st.integers(1, 10))
def test_cost_equals_a_loop_over_trained_rows(
    rows: list[tuple[int, list[list[int]]]], data: st.DataObject, batch_size: int, limit: int
) -> None:
    file = encoded(rows)
    corpus = Corpus([file.arrays.truncate(limit)])
    held_out = data.draw(st.sets(st.integers(0, max(corpus.num_rows - 1, 0))))

    found = examined([file], limit, sorted(held_out)).cost(batch_size)

    kept = [[mask[:limit] for mask in masks if any(mask[:limit])] for _, masks in rows]
    kept = [masks for masks in kept if masks]
    trains = [masks for i, masks in enumerate(kept) if i not in held_out]
    held = [masks for i, masks in enumerate(kept) if i in held_out]
    assert found == Cost(
        math.ceil(len(trains) / batch_size),
        sum(len(mask) for masks in trains for mask in masks),
        sum(sum(mask) for masks in trains for mask in masks),
        sum(len(mask) for masks in held for mask in masks),
    )


def test_row_is_found_by_its_number_in_every_file() -> None:
    found = examples()

    assert found.of_row(4) == [1, 2, 3]
    assert found.of_row(9) == [4]
    assert found.of_row(5) == []
    shown = found.show(range(5), ByteTokenizer(narrow=False), ())
    assert [(one.path, one.row, one.split, one.cut, one.part, one.parts) for one in shown] == [
        ("a.jsonl", 1, "train", 0, 1, 1),
        # The cut removes the second part.
        ("a.jsonl", 4, "train", 0, 1, 2),
        ("b.jsonl", 4, "train", 0, 1, 1),
        ("v.jsonl", 4, "validation", 3, 1, 1),
        ("v.jsonl", 9, "validation", 0, 1, 1),
    ]
    assert [(one.tokens, one.supervised) for one in shown] == [
        *((2, 1), (3, 2), (1, 1), (3, 1), (2, 1)),
    ]


def test_parts_of_a_row_are_counted_and_held_out_together() -> None:
    file = encoded([(2, [[1]]), (5, [[1], [1, 1], [1, 1, 1]])])
    found = examined([file], None, [1])

    shown = found.show(range(4), ByteTokenizer(narrow=False), ())

    assert [(one.part, one.parts, one.split, one.tokens) for one in shown] == [
        *((1, 1, "train", 1), (1, 3, "validation", 1)),
        *((2, 3, "validation", 2), (3, 3, "validation", 3)),
    ]


def test_kinds_shown_are_those_of_findings_that_name_the_row_of_that_file() -> None:
    found = [
        Finding("warning", "odd", 2, "", (Place("a.jsonl", 4), Place("v.jsonl", 9))),
        Finding("error", "worse", 1, "", (Place("v.jsonl", 9, "here"),)),
    ]

    shown = examples().show(range(5), ByteTokenizer(narrow=False), found)
    kinds = [one.kinds for one in shown]

    assert kinds == [(), ("odd",), (), (), ("odd", "worse")]


# Pairs


def side(row: int, role: int, prompt: str, answer: str) -> Example:
    text = prompt + answer
    mask = [0] * len(prompt) + [1] * len(answer)
    return Example(
        row,
        np.array(ByteTokenizer(narrow=False).encode_batch([text])[0].ids, dtype=np.int32),
        np.array(mask, dtype=np.uint8),
        role=role,
    )


def pair(row: int, chosen: str, rejected: str, prompt: str = "At 8?") -> list[Example]:
    return [side(row, CHOSEN, prompt, chosen), side(row, REJECTED, prompt, rejected)]


def examined_pairs(examples: list[Example]) -> InspectedExamples:
    file = EncodedFile(ExampleArrays.of(examples), SkippedRows(Path("a.jsonl")), RowTally())
    return examined([file], None, [])


def test_answers_of_a_pair_are_together_with_their_differences_marked() -> None:
    found = examined_pairs(pair(3, "8 pm, 4 seats", "8 am, 4 seat"))

    (together_,) = together(found.show(range(2), ByteTokenizer(narrow=False), ()))

    assert isinstance(together_, ShownPair)
    assert [(answer.role, answer.part, answer.parts) for answer in together_.answers] == [
        ("chosen", 1, 1),
        ("rejected", 1, 1),
    ]
    assert together_.common == len("At 8?")
    marked = [
        "".join(piece.text if piece.differs else "." for piece in answer.pieces)
        for answer in together_.answers
    ]
    assert marked == ["." * 7 + "p" + "." * 9 + "s", "." * 7 + "a" + "." * 9]
    assert [answer.differing for answer in together_.answers] == [2, 1]


def test_lone_answers_of_pairs_and_labeled_answers_are_separate() -> None:
    sides = pair(3, "yes", "no")
    whole = side(3, WHOLE, "At 8?", "yes")
    labeled = side(4, DESIRABLE, "At 8?", "yes")
    found = examined_pairs([*sides, sides[1], whole, labeled, example(5, [0, 1])])

    shown = found.show(range(6), ByteTokenizer(narrow=False), ())

    names = [each.role if isinstance(each, ShownExample) else "pair" for each in together(shown)]
    assert names == ["pair", "rejected", "prompt and chosen", "desirable", "answer"]


def test_rows_of_pairs_are_shown_whole() -> None:
    found = examined_pairs([each for row in range(1, 21) for each in pair(row, "yes", "no")])
    assert found.choose([], 3) == [0, 1, 18, 19, 38, 39]
    named = Finding("warning", "odd", 1, "", (Place("a.jsonl", 7),))
    assert found.choose([named], 1) == [12, 13]


@pytest.mark.parametrize("count", [0, 1, 3, 9, 10, 40, 100, 1000])
def test_chosen_examples_are_spread_from_first_to_last(count: int) -> None:
    file = encoded([(row, [[1]]) for row in range(1, 101)])
    found = examined([file], None, []).choose([], count)

    assert found == sorted(set(found))
    assert len(found) == min(count, 100)
    assert found[:1] == [0][:count]
    assert count < 2 or found[-1] == 99
    gaps = np.diff(found)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_rows_that_findings_name_are_chosen_and_the_others_still_spread() -> None:
    file = encoded([(row, [[1]]) for row in range(1, 101)])
    named = (Place("a.jsonl", 14), Place("a.jsonl", 15), Place("b.jsonl", 40), Place("a.jsonl", 0))
    found = examined([file], None, []).choose([Finding("warning", "odd", 2, "", named)], 20)

    assert {13, 14} <= set(found)
    assert 39 not in found
    assert (found[0], found[-1]) == (0, 99)
    assert 18 <= len(found) <= 20


def test_rows_of_many_findings_are_all_shown_however_few_were_asked_for() -> None:
    file = encoded([(row, [[1]]) for row in range(1, 101)])
    named = Finding("warning", "odd", 2, "", tuple(Place("a.jsonl", row) for row in range(20, 50)))
    found = examined([file], None, [])

    assert found.choose([named], 10) == found.choose([named], 0) == list(range(19, 49))


# Pieces


@pytest.mark.parametrize("narrow", [False, True])
def test_characters_of_several_tokens_are_one_piece(narrow: bool) -> None:
    tokenizer = ByteTokenizer(narrow, eos="<end>", control_ids=frozenset([257]))
    (found,), _, _ = encode(tokenizer, converse(("user", "é"), ("assistant", "🦙b")))
    example = replace(
        found,
        tokens=np.append(found.tokens, 257).astype(np.int32),
        assistant_mask=np.append(found.assistant_mask, 0).astype(np.uint8),
    )

    shown = list(text_pieces(example, tokenizer))

    assert Piece("é", 2, False, False) in shown
    start = shown.index(Piece("🦙", 4, False, True))
    assert shown[start + 1] == Piece("b", 1, False, True)
    assert shown[-1] == Piece("<end>", 1, True, False)
    assert sum(piece.tokens for piece in shown) == len(example)


def test_split_characters_are_shown_as_such() -> None:
    tokenizer = ByteTokenizer(narrow=False, eos="<end>", control_ids=frozenset([257]))
    llama = list("🦙".encode())
    tokens = [*llama[:2], 257, *llama[2:], *llama, *llama[:1]]
    mask = [0] * 5 + [0, 0, 1, 1] + [1]

    shown = list(text_pieces(Example(1, np.array(tokens), np.array(mask)), tokenizer))

    assert [(piece.control, piece.supervised) for piece in shown if piece.control] == [
        (True, False)
    ]
    assert shown[1].text == "<end>"
    assert "🦙" not in "".join(piece.text for piece in shown)
    assert {piece.text.strip("�") for piece in shown} == {"", "<end>"}
    assert sum(piece.tokens for piece in shown) == len(tokens)


@settings(deadline=None)
@given(
    text=st.text(st.sampled_from("aé日🦙\n"), max_size=12), data=st.data(), use_words=st.booleans()
)
def test_pieces_join_to_the_text_and_their_tokens_to_the_mask(
    text: str, data: st.DataObject, use_words: bool
) -> None:
    tokenizer = words() if use_words else ByteTokenizer(narrow=False)
    (encoded,) = tokenizer.encode_batch([text])
    characters = data.draw(
        st.lists(st.integers(0, 1), min_size=len(text), max_size=len(text)), label="mask"
    )
    mask = [characters[start] for start, _ in encoded.offsets]

    one = Example(1, np.array(encoded.ids, dtype=np.int32), np.array(mask, dtype=np.uint8))
    shown = list(text_pieces(one, tokenizer))

    assert "".join(piece.text for piece in shown) == text
    assert [piece.supervised for piece in shown for _ in range(piece.tokens)] == list(
        map(bool, mask)
    )
    assert not any(piece.control for piece in shown)
    assert all(len(piece.text) == 1 for piece in shown) or use_words


def test_invalid_utf_8_becomes_replacement_characters_at_once() -> None:
    one = Example(1, np.array([0xFF, 0x61, 0xC3]), np.array([0, 0, 0]))

    assert list(text_pieces(one, ByteTokenizer(narrow=False))) == [
        *(Piece("�", 1, False, False), Piece("a", 1, False, False), Piece("�", 1, False, False)),
    ]


# The whole inspection


def test_inspection_is_json_with_its_version_and_knows_its_errors() -> None:
    values = json.loads(json.dumps(INSPECTION.as_dict()))

    assert values["schema_version"] == 1
    assert values["cost"]["validation_tokens"] == INSPECTION.cost.validation_tokens
    assert [finding.kind for finding in INSPECTION.errors] == ["looks wrong"]
    assert str(Place("a.jsonl", 7)) == "a.jsonl:7"
    assert str(Place("a.jsonl", 7, "odd")) == "a.jsonl:7: odd"


@pytest.mark.parametrize(
    ("length", "limit", "found"),
    [
        (1000, 512, TruncationReport(0.488, 1024)),
        (600, 512, TruncationReport(88 / 600, 768)),
        (600, 300, TruncationReport(0.5, 768)),
        (770, 512, TruncationReport(258 / 770, 768)),
        (515, 512, None),
        (500, 512, None),
    ],
)
def test_loss_of_supervised_tokens_names_the_smallest_round_limit(
    length: int, limit: int, found: TruncationReport | None
) -> None:
    loss = truncation_report([encoded([(1, [[1] * length])])], limit, "end")
    if loss is None or found is None:
        assert loss is found
    else:
        assert (loss.fraction, loss.enough) == (pytest.approx(found.fraction), found.enough)


def test_context_cut_at_its_start_loses_no_supervised_tokens() -> None:
    file = encoded([(1, [[0] * 900 + [1] * 100])])
    assert truncation_report([file], 512, "end") == TruncationReport(1.0, 1024)
    assert truncation_report([file], 512, "start") is None


def test_preference_rows_that_are_longer_are_skipped_and_counted() -> None:
    sides = [
        replace(example(row, [0] + [1] * length), role=role)
        for row, length in ((1, 600), (2, 100), (3, 600))
        for role in (CHOSEN, REJECTED)
    ]
    file = EncodedFile(ExampleArrays.of(sides), SkippedRows(Path("a.jsonl")), RowTally())
    assert truncation_report([file], 512, "end") == TruncationReport(pytest.approx(12 / 13), 768, 2)
