"""Findings in the data, against a comparison of the rows one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data import findings, problems
from mlxtune.core.data.conversation import CHOSEN, DESIRABLE, REJECTED, UNDESIRABLE
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.data.encoded_file import EncodedFile, ExampleArrays
from mlxtune.core.data.findings import Finding, Place
from mlxtune.core.data.held_out import RunRows
from mlxtune.core.data.problems import ADVICE, BadRowError, RowTally, SkippedRows


def encoded(name: str, tokens: Sequence[int], first: int = 1) -> EncodedFile:
    """Encode a row for each number: a token with this number before a supervised token."""
    examples = [
        Example(row, np.array([token, 9], dtype=np.int32), np.array([0, 1], dtype=np.uint8))
        for row, token in enumerate(tokens, start=first)
    ]
    return EncodedFile(ExampleArrays.of(examples), SkippedRows(Path(name)), RowTally())


def find(train: list[EncodedFile], validation: list[EncodedFile] | None = None) -> list[Finding]:
    parts = [
        Corpus([file.arrays.truncate() for file in part]) for part in (train, validation or [])
    ]
    held_out = parts[0].select([]) if validation is None else parts[1].select()
    rows = RunRows(parts[0].select(), held_out)
    return findings.row_findings([*train, *(validation or [])], rows)


def test_row_that_repeats_an_earlier_one_is_found_also_in_another_file() -> None:
    files = [encoded("a.jsonl", [5, 6, 5], first=4), encoded("b.jsonl", [7, 6, 7])]

    (found,) = find(files)

    assert found == Finding(
        *("warning", problems.DUPLICATE, 3, ADVICE[problems.DUPLICATE]),
        (
            Place("a.jsonl", 6, "same as a.jsonl:4"),
            Place("b.jsonl", 2, "same as a.jsonl:5"),
            Place("b.jsonl", 3, "same as b.jsonl:1"),
        ),
    )
    assert [file.notes.counts[problems.DUPLICATE] for file in files] == [1, 2]


def test_leak_is_a_validation_row_in_train_not_a_duplicate() -> None:
    train = [encoded("a.jsonl", [5]), encoded("b.jsonl", [6])]
    validation = [encoded("v.jsonl", [7, 7, 6]), encoded("w.jsonl", [5])]

    (found,) = find(train, validation)

    assert (found.kind, found.rows, found.level) == (problems.LEAK, 2, "warning")
    assert found.places == (
        Place("v.jsonl", 3, "same as b.jsonl:1"),
        Place("w.jsonl", 1, "same as a.jsonl:1"),
    )


def test_near_copy_of_a_training_row_is_reported_as_a_leak() -> None:
    train, validation = [encoded("a.jsonl", [5, 6])], [encoded("v.jsonl", [7, 15, 6])]
    corpora = [Corpus([file.arrays.truncate() for file in part]) for part in (train, validation)]
    rows = RunRows(corpora[0].select(), corpora[1].select())

    # Tokens with the same last digit count as near copies.
    def text_hash(example: Example) -> int:
        return int(example.tokens[0]) % 10

    (found,) = findings.row_findings([*train, *validation], rows, text_hash)

    assert (found.kind, found.rows) == (problems.LEAK, 2)
    assert {place.row: place.detail[:29] for place in found.places} == {
        3: "same as a.jsonl:2",
        2: "same as a.jsonl:1 but for whi",
    }


def test_held_out_near_copy_of_a_training_row_is_a_leak_too() -> None:
    file = encoded("a.jsonl", [5, 6, 7, 15, 8])
    corpus = Corpus([file.arrays.truncate()])
    rows = RunRows(corpus.select([0, 1, 4]), corpus.select([2, 3]))

    (found,) = findings.row_findings([file], rows, lambda example: int(example.tokens[0]) % 10)

    assert (found.kind, [place.row for place in found.places]) == (problems.LEAK, [4])


@settings(deadline=None)
@given(
    train=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=3),
    validation=st.lists(st.integers(0, 8), min_size=1, max_size=6),
)
def test_duplicates_and_leaks_match_a_row_comparison(
    train: list[list[int]], validation: list[int]
) -> None:
    files = [encoded(f"{i}.jsonl", tokens) for i, tokens in enumerate(train)]

    found = find(files, [encoded("v.jsonl", validation)])

    flat = [(f"{i}.jsonl", row, t) for i, rows in enumerate(train) for row, t in enumerate(rows, 1)]
    copies = [
        Place(path, row, "same as {}:{}".format(*next(o[:2] for o in flat if o[2] == token)))
        for n, (path, row, token) in enumerate(flat)
        if any(other == token for _, _, other in flat[:n])
    ]
    leaks = [
        Place("v.jsonl", row, "same as {}:{}".format(*next(o[:2] for o in flat if o[2] == token)))
        for row, token in enumerate(validation, 1)
        if any(other == token for _, _, other in flat)
    ]
    rows = {finding.kind: finding.rows for finding in found}
    places = {finding.kind: finding.places for finding in found}
    expected = {problems.DUPLICATE: copies, problems.LEAK: leaks}
    assert rows == {kind: len(places) for kind, places in expected.items() if places}
    assert places == {kind: tuple(places[:5]) for kind, places in expected.items() if places}


def answered(name: str, *rows: Sequence[int]) -> EncodedFile:
    """Encode a prompt of two tokens, an answer of two tokens, and another turn, for each row."""
    mask = np.array([0, 0, 1, 1, 0, 1], np.uint8)
    examples = [
        Example(number, np.array(row, np.int32), mask) for number, row in enumerate(rows, start=1)
    ]
    return EncodedFile(ExampleArrays.of(examples), SkippedRows(Path(name)), RowTally())


def test_prompt_with_another_answer_is_noted() -> None:
    one, other = (1, 5, 7, 7, 2, 8), (1, 5, 7, 9, 2, 8)
    files = [
        answered("a.jsonl", one, (1, 6, 7, 9, 2, 8), other),
        answered("b.jsonl", other, (1, 5, 7, 7, 3, 9)),
    ]

    found = {each.kind: each for each in find(files)}

    assert found.pop(problems.DUPLICATE).rows == 1
    assert [*found] == [problems.ANOTHER_ANSWER]
    note = found[problems.ANOTHER_ANSWER]
    assert (note.level, note.rows) == ("note", 2)
    assert note.places == (
        Place("a.jsonl", 3, "same prompt as a.jsonl:1"),
        Place("b.jsonl", 1, "same prompt as a.jsonl:1"),
    )


def test_near_copy_of_an_answer_is_the_same_answer() -> None:
    file = answered("a.jsonl", (1, 5, 7, 7, 2, 8), (1, 5, 17, 7, 2, 8), (1, 5, 9, 7, 2, 8))
    corpus = Corpus([file.arrays.truncate()])
    rows = RunRows(corpus.select(), corpus.select([]))

    # Tokens with the same last digit count as near copies.
    def text_hash(example: Example) -> int:
        return hash(tuple((example.tokens % 10).tolist()))

    (finding,) = findings.row_findings([file], rows, text_hash)
    assert finding.places == (Place("a.jsonl", 3, "same prompt as a.jsonl:1"),)


def test_text_is_hashed_for_equal_prompts_only() -> None:
    file = answered("a.jsonl", (1, 5, 7, 7, 2, 8), (1, 6, 9, 7, 2, 8))
    corpus = Corpus([file.arrays.truncate()])
    rows = RunRows(corpus.select(), corpus.select([]))

    def text_hash(example: Example) -> int:
        raise AssertionError("a hash of text opens the tokenizer")

    assert findings.row_findings([file], rows, text_hash) == []


def test_first_token_of_plain_text_is_not_a_prompt() -> None:
    examples = [
        Example(row, np.array([1, row], np.int32), np.array([0, 1], np.uint8)) for row in (1, 2)
    ]
    assert find([EncodedFile(ExampleArrays.of(examples), SkippedRows(Path("a")), RowTally())]) == []


def test_distinct_or_absent_rows_give_no_finding() -> None:
    assert find([encoded("a.jsonl", [1, 2, 3])]) == []
    assert find([encoded("a.jsonl", [1, 2, 3])], []) == []
    empty = Corpus([]).select()
    assert findings.row_findings([], RunRows(empty, Corpus([]).select())) == []
    assert findings.row_findings([], RunRows(empty, empty)) == []


def test_findings_are_in_the_order_of_the_tokens_that_they_cost() -> None:
    """Two skipped rows cost two average answers, and a cut answer costs its lost tokens."""
    row = Example(1, np.arange(9, dtype=np.int32), np.array([0] * 3 + [1] * 6, dtype=np.uint8))
    file = EncodedFile(ExampleArrays.of([row]), SkippedRows(Path("a.jsonl")), RowTally())
    for number in (2, 3):
        file.skipped.add(number, problems.BadRowError("no answer"))
    for number in range(4, 9):
        file.notes.count(number, problems.REFUSAL)
    file = file.truncate(5)
    corpus = Corpus.of_files([file])
    rows = RunRows(corpus.select(), corpus.select([]))
    found = findings.row_findings([file], rows) + findings.skip_findings([file])

    assert [(each.kind, each.tokens, each.rows) for each in findings.by_loss(found)] == [
        ("no answer", 12, 2),
        (problems.TRUNCATED_ANSWER, 4, 1),
        (problems.REFUSAL, 0, 5),
    ]


def test_errors_come_first_and_then_what_concerns_most_rows() -> None:
    files = [encoded("a.jsonl", [1]), encoded("b.jsonl", [2])]
    for row in range(1, 5):
        files[0].notes.count(row, problems.CONTROL_TOKEN, "<s>")
        for kind in (problems.NO_PROMPT, problems.DOUBLE_BOS, problems.CONTROL_TOKEN):
            files[1].notes.count(row, kind)

    found = findings.by_loss(find(files))

    assert [(one.level, one.kind, one.rows) for one in found] == [
        ("error", problems.DOUBLE_BOS, 4),
        ("warning", problems.CONTROL_TOKEN, 8),
        ("warning", problems.NO_PROMPT, 4),
    ]
    assert [one.advice for one in found] == [ADVICE[one.kind] for one in found]
    places = [Place("a.jsonl", row, "<s>") for row in range(1, 5)] + [Place("b.jsonl", 1)]
    assert found[1].places == tuple(places)


def test_skipped_rows_are_findings_by_reason() -> None:
    files = [encoded("a.jsonl", [1]), encoded("b.jsonl", [2])]
    files[0].skipped.add(3, BadRowError("not valid JSON", "at column 7"))
    for row in range(1, 8):
        files[1].skipped.add(row, BadRowError("not valid JSON"))
    files[1].skipped.add(9, BadRowError("empty answer", "message 2"))

    first, second = findings.skip_findings(files)

    assert (first.level, first.kind, first.rows) == ("warning", "not valid JSON", 8)
    assert first.places == (
        Place("a.jsonl", 3, "at column 7"),
        *(Place("b.jsonl", row) for row in range(1, 5)),
    )
    assert (second.rows, second.places) == (1, (Place("b.jsonl", 9, "message 2"),))
    assert Counter(map(str, second.places)) == Counter(["b.jsonl:9: message 2"])
    assert second.advice == "the row is skipped: fix it or remove it"
    assert list(findings.skip_findings([encoded("a.jsonl", [1])])) == []


def test_row_that_its_mark_hides_needs_no_remedy() -> None:
    for kind in problems.MARK_REASONS.values():
        file = encoded("a.jsonl", [1])
        file.skipped.add(1, BadRowError(kind))
        (finding,) = findings.skip_findings([file])
        assert finding.advice == "the row is skipped, as its mark says"


def test_row_that_is_only_too_long_need_not_be_removed() -> None:
    file = encoded("a.jsonl", [1])
    file.skipped.add(3, BadRowError("no supervised token within --max-seq-len 512"))
    (found,) = findings.skip_findings([file])
    assert found.advice == "the row is skipped: raise --max-seq-len"


# Preferences


def answer(row: int, role: int, prompt: int, tokens: Sequence[int]) -> Example:
    mask = np.array([0, 0, *(1 for _ in tokens)], dtype=np.uint8)
    return Example(row, np.array([3, prompt, *tokens], dtype=np.int32), mask, role=role)


def paired(name: str, rows: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> EncodedFile:
    """Return rows of a prompt, the chosen answer and the rejected answer."""
    examples = [
        answer(row, role, prompt, tokens)
        for row, (prompt, *sides) in enumerate(rows, start=1)
        for role, tokens in zip((CHOSEN, REJECTED), sides, strict=True)
    ]
    return EncodedFile(ExampleArrays.of(examples), SkippedRows(Path(name)), RowTally())


def test_pair_twice_and_the_other_way_round_are_found() -> None:
    a, b = [5, 6], [7]
    file = paired("a.jsonl", [(1, a, b), (2, a, b), (1, b, a), (1, a, b), (2, b, [8])])

    found = {each.kind: each.places for each in find([file])}

    assert found == {
        problems.DUPLICATE: (Place("a.jsonl", 4, "same as a.jsonl:1"),),
        problems.OPPOSITE: (
            Place("a.jsonl", 3, "the opposite of a.jsonl:1"),
            Place("a.jsonl", 4, "the opposite of a.jsonl:3"),
        ),
    }


def test_prompt_in_train_and_validation_is_reported() -> None:
    train = paired("a.jsonl", [(1, [5], [6]), (2, [5], [6])])
    validation = paired("v.jsonl", [(1, [5], [6]), (2, [8], [9]), (3, [5], [6])])

    found = {each.kind: each.places for each in find([train], [validation])}

    assert found == {
        problems.LEAK: (Place("v.jsonl", 1, "same as a.jsonl:1"),),
        problems.LEAKED_PROMPT: (Place("v.jsonl", 2, "same prompt as a.jsonl:2"),),
    }


def test_length_bias_of_answers_is_reported_with_means() -> None:
    def lengths(rows: list[tuple[int, Sequence[int], Sequence[int]]]) -> list[Finding]:
        return list(findings.length_findings(Corpus([paired("a", rows).arrays.truncate()])))

    assert lengths([(1, [5] * 4, [6] * 2), (2, [5] * 4, [6] * 4)]) == []
    (found,) = lengths([(1, [5] * 4, [6] * 2), (2, [5] * 6, [6] * 4)])
    assert found.kind == "chosen answers much longer than rejected ones"
    assert found.advice.startswith("5 and 3 tokens on average: the model will learn length")
    (found,) = lengths([(1, [5], [6] * 9)])
    assert found.kind == "rejected answers much longer than chosen ones"
    assert found.advice.startswith("9 and 1 tokens")
    labeled = [answer(1, DESIRABLE, 1, [5] * 6), answer(2, UNDESIRABLE, 1, [6] * 2)]
    (found,) = findings.length_findings(Corpus([ExampleArrays.of(labeled).truncate()]))
    assert found.kind == "desirable answers much longer than undesirable ones"


def test_rows_with_one_prompt_are_trained_on_or_held_out_together() -> None:
    file = paired("a.jsonl", [(row % 5, [10 + row], [9]) for row in range(20)])
    corpus = Corpus([file.arrays.truncate()])

    rows = RunRows.of(corpus, None, 0.2, 0, 100)
    train, held_out = rows.train.indices, rows.validation.indices

    assert len(held_out) == 4 and len({row % 5 for row in held_out}) == 1
    assert not {row % 5 for row in train} & {row % 5 for row in held_out}
