"""Examples in one sequence: laws over any examples, and the pictures of the docs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.data.encode import Example, forward_tokens
from mlxtune.core.steps.pack import Pack, Segment, StepLengths, pack, packed_micro_batches
from mlxtune.core.steps.rounding import Rounding

BOUNDS = st.sampled_from([1, 30, 90, 1000])


def example(context: Sequence[int], answer: Sequence[int], row: int = 1) -> Example:
    """Return an example whose answer alone is supervised, as a whole."""
    return Example(
        row,
        np.array([*context, *answer], dtype=np.int32),
        np.array([0] * len(context) + [1] * len(answer), dtype=np.uint8),
    )


def of_lengths(*runs: int) -> list[Example]:
    """Return examples without shared prefixes that run these numbers of tokens."""
    return [example([100 + i], range(run), row=i) for i, run in enumerate(runs)]


@st.composite
def steps(draw: st.DrawFn, max_size: int = 7) -> list[Example]:
    """Draw examples that begin with a part of one of three scripts, two of which begin alike."""
    fork = draw(st.integers(0, 60))
    scripts = [range(100, 200), [*range(100, 100 + fork), *range(300, 400)], range(500, 600)]

    def one(script: int, said: int, own: int, mask: list[int], row: int) -> Example:
        tokens = [*scripts[script][:said], *range(1000 + own, 1000 + own + len(mask))]
        masked = [0] * said + mask
        return Example(row, np.array(tokens, np.int32), np.array(masked, np.uint8))

    masks = st.builds(
        lambda before, answer: [0] * before + answer,
        st.integers(0, 40),
        st.lists(st.integers(0, 1), min_size=1, max_size=25),
    )
    examples = st.builds(
        one, st.integers(0, 2), st.integers(1, 60), st.integers(0, 3), masks, st.integers(1, 2)
    )
    return draw(st.lists(examples, min_size=1, max_size=max_size))


def chains(line: Pack) -> list[list[int]]:
    """Return the places that each place of a sequence attends to, itself last, from the
    segments.
    """
    seen: list[list[int]] = []
    ends: list[list[int]] = []
    for segment in line.segments:
        before = ends[segment.parent] if segment.parent >= 0 else []
        assert len(before) == segment.position
        for place in range(segment.start, segment.end):
            seen.append([*before, *range(segment.start, place + 1)])
        ends.append(seen[-1])
    return seen


def taught_by(line: Pack) -> Iterator[tuple[int, ...]]:
    """Yield each label of a sequence, after the tokens that predict it."""
    tokens, seen = line.inputs[0], chains(line)
    for place, label in zip(line.label_positions.tolist(), line.labels.tolist(), strict=True):
        yield (*tokens[seen[place]].tolist(), label)


def taught(examples: Sequence[Example]) -> Iterator[tuple[int, ...]]:
    """Yield each supervised token of examples, after the tokens before it."""
    for one in examples:
        for i in np.flatnonzero(one.assistant_mask[1:]).tolist():
            yield tuple(one.tokens[: i + 2].tolist())


@given(steps(), st.booleans())
def test_packed_labels_equal_those_of_single_examples(examples: list[Example], keyed: bool) -> None:
    line = pack(examples, keyed=keyed)
    assert Counter(taught_by(line)) == Counter(taught(examples))
    assert sum(tokens for tokens, _ in line.stretches) == line.inputs.size


@given(steps())
def test_segments_cover_a_sequence_in_order(examples: list[Example]) -> None:
    line = pack(examples)
    edges = [edge for segment in line.segments for edge in (segment.start, segment.end)]
    assert edges[0] == 0
    assert edges[-1] == line.inputs.size
    assert edges[1:-1:2] == edges[2::2]
    assert all(len(segment) > 0 for segment in line.segments)
    assert all(segment.parent < i for i, segment in enumerate(line.segments))


@given(steps())
def test_a_token_is_run_once_for_all_that_continue_it(examples: list[Example]) -> None:
    (one,) = packed_micro_batches(StepLengths.of(examples), 100_000, 0)
    line = pack([examples[i] for i in one.examples])
    beginnings = {
        tuple(one.tokens[: i + 1].tolist()) for one in examples for i in range(forward_tokens(one))
    }
    assert line.inputs.size == one.tokens == len(beginnings)


@given(steps())
def test_keyed_examples_share_within_their_key(examples: list[Example]) -> None:
    (one,) = packed_micro_batches(StepLengths.of(examples, keyed=True), 100_000, 0)
    line = pack([examples[i] for i in one.examples], keyed=True)
    beginnings = {
        (one.key, *one.tokens[: i + 1].tolist())
        for one in examples
        for i in range(forward_tokens(one))
    }
    assert line.inputs.size == one.tokens == len(beginnings)
    owners = [line.row_ids[owner] for owner in line.owners.tolist()]
    for segment in line.segments:
        above = line.segments[segment.parent] if segment.parent >= 0 else segment
        assert len({*owners[segment.start : segment.end], owners[above.start]}) == 1


@given(steps(), st.booleans(), st.data())
def test_lengths_of_some_examples_are_those_that_are_measured(
    examples: list[Example], keyed: bool, data: st.DataObject
) -> None:
    chosen = [i for i in range(len(examples)) if data.draw(st.booleans())]
    measured = StepLengths.of([examples[i] for i in chosen], keyed=keyed)
    assert StepLengths.of(examples, keyed=keyed).only(chosen) == measured


@given(steps(), BOUNDS, st.integers(0, 100), st.booleans())
def test_rounding_adds_padding_that_no_token_sees(
    examples: list[Example], bound: int, fixed: int, keyed: bool
) -> None:
    lengths = StepLengths.of(examples, keyed=keyed)
    exact = packed_micro_batches(lengths, bound, fixed)
    rounded = packed_micro_batches(lengths, bound, fixed, Rounding(length=64, width=32))
    by_examples = (sorted(each, key=lambda one: one.examples) for each in (exact, rounded))
    for plain, one in zip(*by_examples, strict=True):
        chosen = [examples[i] for i in one.examples]
        line, padded = pack(chosen, keyed=keyed), pack(chosen, keyed=keyed, padding=one.added)
        assert one.examples == plain.examples
        assert plain.tokens == one.tokens - one.added == line.inputs.size
        assert padded.inputs.size == padded.owners.size == one.tokens
        assert one.padding(lengths.forward) == plain.padding(lengths.forward) + one.added
        assert padded.stretches == line.stretches
        assert list(taught_by(padded)) == list(taught_by(line))
        # Side by side, every example fits the planned width.
        widest = max(map(len, chains(padded)))
        assert one.width == -(-widest // 32) * 32
        if one.added:
            assert one.tokens <= bound
            assert one.added <= 0.03 * plain.tokens
            assert padded.segments[-1].start == plain.tokens


@given(steps(), BOUNDS, st.integers(0, 100), st.booleans())
def test_each_example_is_in_one_sequence_that_is_short_enough(
    examples: list[Example], bound: int, fixed: int, keyed: bool
) -> None:
    micro_batches = packed_micro_batches(StepLengths.of(examples, keyed=keyed), bound, fixed)
    assert sorted(i for one in micro_batches for i in one.examples) == list(range(len(examples)))
    for one in micro_batches:
        line = pack([examples[i] for i in one.examples], keyed=keyed)
        assert one.width == max(forward_tokens(examples[i]) for i in one.examples)
        assert line.inputs.size == one.tokens
        assert one.tokens <= bound or len(one.examples) == 1
    assert micro_batches == packed_micro_batches(
        StepLengths.of(examples, keyed=keyed), bound, fixed
    )
    assert [one.tokens for one in micro_batches] == sorted(
        (p.tokens for p in micro_batches), reverse=True
    )


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12))
def test_sequences_are_almost_as_few_as_possible(runs: list[int]) -> None:
    micro_batches = packed_micro_batches(StepLengths.of(of_lengths(*runs)), 100, 50)
    # Two consecutive sequences together exceed one sequence's bound, so at least half the space is
    # used.
    assert len(micro_batches) <= max(1, -(-2 * sum(runs) // 100))


def test_diagram_in_the_docstring_is_true() -> None:
    a, b, c, d, e, x, y, p, q, r = range(10)
    first, second, third = (
        example([], each) for each in ([a, b, c, d, e], [a, b, x, y], [p, q, r])
    )
    line = pack([first, second, third])
    assert line.inputs.tolist() == [[a, b, c, d, x, p, q]]
    assert line.segments == (
        Segment(0, 2, 0, -1),
        Segment(2, 4, 2, 0),
        Segment(4, 5, 2, 0),
        Segment(5, 7, 0, -1),
    )
    assert chains(line)[4] == [0, 1, 4]
    assert line.labels.tolist() == [b, c, d, e, b, x, y, q, r]
    assert line.label_positions.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]
    assert line.owners.tolist() == [0, 0, 0, 0, 1, 2, 2]


def test_duplicate_example_runs_once() -> None:
    one = example([1, 2], [3, 4])
    line = pack([one, one])
    assert line.inputs.tolist() == [[1, 2, 3]]
    assert line.labels.tolist() == [3, 4, 3, 4]


def test_examples_that_share_many_tokens_are_in_one_sequence() -> None:
    system, other = list(range(100, 300)), list(range(400, 600))
    families = [example(context, [i], row=i) for i in range(6) for context in (system, other)]
    micro_batches = packed_micro_batches(StepLengths.of(families), 210, 50)
    assert [one.tokens for one in micro_batches] == [200, 200]


def test_families_stay_together_where_they_fit() -> None:
    system, other = list(range(100, 150)), list(range(400, 450))
    rests = [range(1000 + 20 * i, 1010 + 20 * i) for i in range(6)]
    examples = [example(other if i % 2 else system, rest, i) for i, rest in enumerate(rests)]
    micro_batches = packed_micro_batches(StepLengths.of(examples), 100, 10)
    assert sorted(sorted(one.examples) for one in micro_batches) == [[0, 2, 4], [1, 3, 5]]
    assert [one.tokens for one in micro_batches] == [50 + 3 * 9] * 2


def test_long_example_has_its_own_sequence() -> None:
    micro_batches = packed_micro_batches(StepLengths.of(of_lengths(10, 300, 20)), 100, 50)
    assert [(sorted(one.examples), one.tokens) for one in micro_batches] == [
        ([1], 300),
        ([0, 2], 30),
    ]


def test_600_examples_are_all_packed() -> None:
    micro_batches = packed_micro_batches(StepLengths.of(of_lengths(*[30] * 600)), 1000, 50)
    assert sorted(i for one in micro_batches for i in one.examples) == list(range(600))
    assert len(micro_batches) <= 21


def test_nothing_to_pack() -> None:
    assert packed_micro_batches(StepLengths.of([]), 100, 50) == []
    with pytest.raises(ValueError):
        pack([])


def test_padding_follows_the_shortest_example() -> None:
    """Side by side, `a b c d e`, `a b x . .` and `p q r s` need no more width.

    tokens      a b c d e x p q r s . .
    segments    [a b] [c d e] [x] [p q r s] [. .]
    """
    a, b, c, d, e, x, p, q, r, s, end = range(1, 12)
    first, second = example([a, b], [c, d, e, end]), example([a, b], [x, end])
    line = pack([first, second, example([p, q, r], [s, end])], padding=2)
    assert line.inputs[0, -2:].tolist() == [0, 0]
    assert line.segments[-1] == Segment(10, 12, 3, 2)
    assert line.segments[2] == Segment(5, 6, 2, 0)
