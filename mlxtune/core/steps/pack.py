"""Examples laid end to end in one sequence: no example is padded, and a shared prefix runs once.

    tokens           a b c d e      a b x y      p q r
    in one sequence      a b c d   x    p q          the last token of each is predicted, not run
    segments         [a b] [c d] [x] [p q]       c and x continue a b, p continues none

Positions count from the start of each example. A token attends to earlier tokens of its segment and
to the segments that its segment continues, so no token sees tokens of another example.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.encode import Example, forward_tokens, predicted_tokens
from mlxtune.core.steps.micro_batch import BLOCK_EXAMPLES, MicroBatch, cheapest_division
from mlxtune.core.steps.rounding import NOT_ROUNDED, Rounding

_Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens `start` to `end` of a sequence, which continue the segment `parent`.

    `parent` is the index of an earlier segment, or -1. `position` is the first token's position in
    its example: the number of tokens in the segment's ancestors.
    """

    start: int
    end: int
    position: int
    parent: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Examples packed into one sequence, with the labels that their tokens predict.

    `inputs` is int32 (1, T). `label_positions` int32 (P,) are the positions in the sequence that
    predict `labels` int32 (P,), one for each supervised token; `counts` gives the number of labels
    of each example. `row_ids` has each example's row key, which seeds the example's random numbers,
    and `owners` int32 (T,) each token's example. With `is_rounded`, the last segment is padding,
    which no token sees.
    """

    inputs: _Ints
    segments: tuple[Segment, ...]
    label_positions: _Ints
    labels: _Ints
    counts: tuple[int, ...]
    row_ids: tuple[int, ...]
    owners: _Ints
    is_rounded: bool = False

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """Each segment without padding: its length, and its first token's position."""
        real = self.segments[:-1] if self.is_rounded else self.segments
        return [(len(segment), segment.position) for segment in real]


@dataclass(frozen=True, slots=True)
class StepLengths:
    """The lengths of a step's examples and of their common prefixes, which decide micro-batches.

    Each example has `tokens`, of which `forward` run through the model, and `supervised` of these
    predict a supervised token. `order` sorts the examples so that neighbours share the longest
    prefixes, and `shared` counts the tokens that each has in common with the previous, or 0.
    """

    tokens: tuple[int, ...]
    forward: tuple[int, ...]
    supervised: tuple[int, ...]
    row_ids: tuple[int, ...]
    order: tuple[int, ...]
    shared: tuple[int, ...]

    @classmethod
    def of(cls, examples: Sequence[Example], *, keyed: bool = False) -> StepLengths:
        """Measure examples; with `keyed`, only examples with the same `key` share a prefix."""
        texts = [_run(example) for example in examples]
        row_ids = tuple(example.key for example in examples)
        keys = row_ids if keyed else (0,) * len(examples)
        # As big-endian bytes, tokens sort by value, and a prefix comes before its continuations.
        bytes_of = [text.astype(">u4").tobytes() for text in texts]
        order = sorted(range(len(examples)), key=lambda i: (keys[i], bytes_of[i], i))
        shared = [
            _common_prefix_length(texts[i], texts[j]) if keys[i] == keys[j] else 0
            for i, j in pairwise(order)
        ]
        return cls(
            tuple(map(len, examples)),
            tuple(map(len, texts)),
            tuple(map(predicted_tokens, examples)),
            row_ids,
            tuple(order),
            (0, *shared)[: len(order)],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def only(self, selected: Sequence[int]) -> StepLengths:
        """Return the lengths of the examples with these indices, which ascend."""
        index_of = {i: index for index, i in enumerate(selected)}
        order, shared, common = list[int](), list[int](), 0
        for i, before in zip(self.order, self.shared, strict=True):
            common = min(common, before)
            if i in index_of:
                order.append(index_of[i])
                shared.append(common)
                common = self.forward[i]
        columns = (self.tokens, self.forward, self.supervised, self.row_ids)
        tokens, forward, supervised, row_ids = (
            tuple(column[i] for i in selected) for column in columns
        )
        return StepLengths(tokens, forward, supervised, row_ids, tuple(order), tuple(shared))


def packed_micro_batches(
    lengths: StepLengths, max_tokens: int, fixed: int, rounding: Rounding = NOT_ROUNDED
) -> list[MicroBatch]:
    """Pack the examples of a step into sequences of at most `max_tokens` tokens, the largest first.

    `fixed` is the cost of a sequence beyond its tokens, in units of one token's time. An example
    longer than `max_tokens` gets a separate sequence. A prefix that examples of a sequence share
    counts once. Lengths are rounded after packing. Deterministic for given arguments.
    """
    forward, micro_batches = lengths.forward, list[MicroBatch]()
    for start in range(0, len(lengths), BLOCK_EXAMPLES):
        selected, shared = (
            each[start : start + BLOCK_EXAMPLES] for each in (lengths.order, lengths.shared)
        )
        packer = _SequencePacker([forward[i] for i in selected], shared[1:], max_tokens)
        for sequence in packer.least(fixed):
            members = tuple(selected[index] for index in sequence)
            tokens, longest = packer.tokens(sequence), max(forward[i] for i in members)
            added = rounding.padding(tokens, max_tokens)
            width = rounding.rounded_width(max(longest, packer.shortest(sequence) + added))
            micro_batches.append(MicroBatch(members, width, tokens + added, added))
    return sorted(
        micro_batches, key=lambda micro_batch: (-micro_batch.tokens, micro_batch.examples)
    )


def _run(example: Example) -> _Ints:
    return example.tokens[: forward_tokens(example)]


def _common_prefix_length(a: _Ints, b: _Ints) -> int:
    """Return the length of the common prefix of two token sequences."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


class _SequencePacker:
    """Distributes examples over sequences. Examples are named by their index in the sorted order.

    `lengths` has the length of each example, and `neighbors` the length of its common prefix with
    the next example.
    """

    def __init__(self, lengths: list[int], neighbors: Sequence[int], max_tokens: int) -> None:
        self._lengths = lengths
        self._max_tokens = max_tokens
        # The number of tokens that examples i and j > i share, as [i][j - i - 1].
        self._shared = [list(accumulate(neighbors[i:], min)) for i in range(len(lengths))]

    def least(self, fixed: int) -> list[list[int]]:
        """Return the cheapest distribution: for each sequence, its examples in order.

        A sequence costs its tokens plus `fixed`. Compares the best cut of the sorted order with
        greedy fillings of as few sequences as possible, of one sequence more, and so on up to the
        number of sequences in that cut.
        """
        options = [self._divide_in_order(fixed)]
        beyond = sum(max(length - self._max_tokens, 0) for length in self._lengths)
        min_count = -(-(self.tokens(range(len(self._lengths))) - beyond) // self._max_tokens)
        for count in range(max(min_count, 1), len(options[0]) + 1):
            filled = (self._fill(count, sharing_first=first) for first in (True, False))
            options += [sequences for sequences in filled if sequences is not None]
        return min(
            options,
            key=lambda sequences: sum(fixed + self.tokens(sequence) for sequence in sequences),
        )

    def tokens(self, sequence: Sequence[int]) -> int:
        return sum(self._lengths[i] for i in sequence) - sum(
            self._common(i, j) for i, j in pairwise(sequence)
        )

    def shortest(self, sequence: Sequence[int]) -> int:
        """Return the length of the shortest example that is not a prefix of the next example."""
        ends = [
            self._lengths[i] for i, j in pairwise(sequence) if self._common(i, j) < self._lengths[i]
        ]
        return min([*ends, self._lengths[sequence[-1]]])

    def _common(self, i: int, j: int) -> int:
        return self._shared[i][j - i - 1]

    def _added(self, sequence: Sequence[int], index: int) -> int:
        added, at = self._lengths[index], bisect(sequence, index)
        if at:
            added -= self._common(sequence[at - 1], index)
        if at < len(sequence):
            added -= self._common(index, sequence[at])
        if 0 < at < len(sequence):
            added += self._common(sequence[at - 1], sequence[at])
        return added

    def _divide_in_order(self, fixed: int) -> list[list[int]]:
        """Cut the sorted order, in which neighbours share the longest prefixes, into sequences."""

        def costs(start: int) -> Iterator[int]:
            tokens = 0
            for end, length in enumerate(self._lengths[start:], start):
                tokens += length - (self._common(end - 1, end) if end > start else 0)
                if tokens > self._max_tokens and end > start:
                    return
                yield fixed + tokens

        return [list(part) for part in cheapest_division(len(self._lengths), costs)]

    def _fill(self, count: int, *, sharing_first: bool) -> list[list[int]] | None:
        """Put each example, the longest first, into the sequence where it adds the fewest tokens.

        Without `sharing_first`, choose the emptiest sequence. Returns None if the sequences are too
        few.
        """
        sequences: list[list[int]] = [[] for _ in range(count)]
        tokens = [0] * count
        for index in sorted(
            range(len(self._lengths)), key=lambda index: (-self._lengths[index], index)
        ):
            best: tuple[int, int, int, int] | None = None
            for number, sequence in enumerate(sequences):
                added = self._added(sequence, index)
                if not sequence or tokens[number] + added <= self._max_tokens:
                    rank = (added if sharing_first else 0, tokens[number], number, added)
                    best = rank if best is None else min(best, rank)
            if best is None:
                return None
            *_, number, added = best
            insort(sequences[number], index)
            tokens[number] += added
        return [sequence for sequence in sequences if sequence]


def pack(examples: Sequence[Example], *, keyed: bool = False, padding: int = 0) -> Pack:
    """Lay examples end to end and shift them: each position predicts the token after it.

    A prefix that an example shares with the previous one runs once. `padding` tokens of id 0 at the
    end continue the shortest example, which has the most room when examples are side by side.
    """
    inputs: list[_Ints] = []
    owners: list[_Ints] = []
    label_positions: list[_Ints] = []
    labels: list[_Ints] = []
    links: list[tuple[int, int, int]] = []
    at = np.zeros(0, dtype=np.int32)
    total = 0
    for i, example in enumerate(examples):
        length, shared = forward_tokens(example), 0
        if i and (not keyed or example.key == examples[i - 1].key):
            shared = _common_prefix_length(_run(examples[i - 1]), _run(example))
        if length > shared:
            links.append((total, shared, int(at[shared - 1]) if shared else -1))
        # The index in the sequence of each token of this example.
        at = np.append(at[:shared], np.arange(total, total + length - shared, dtype=np.int32))
        total += length - shared
        inputs.append(example.tokens[shared:length])
        owners.append(np.full(length - shared, i, dtype=np.int32))
        supervised = np.flatnonzero(example.assistant_mask[1 : length + 1])
        label_positions.append(at[supervised])
        labels.append(example.tokens[1:][supervised])
    segments = tuple(_segments(links, total))
    if padding:
        inputs.append(np.zeros(padding, dtype=np.int32))
        owners.append(np.zeros(padding, dtype=np.int32))
        segments += (_behind_shortest(segments, padding),)
    return Pack(
        inputs=np.concatenate(inputs).astype(np.int32)[None],
        segments=segments,
        label_positions=np.concatenate(label_positions),
        labels=np.concatenate(labels).astype(np.int32),
        counts=tuple(map(len, labels)),
        row_ids=tuple(example.key for example in examples),
        owners=np.concatenate(owners),
        is_rounded=padding > 0,
    )


def _behind_shortest(segments: Sequence[Segment], length: int) -> Segment:
    """Return a segment at the end of a sequence that continues its shortest example."""
    continued = {segment.parent for segment in segments}
    ends = [i for i in range(len(segments)) if i not in continued]
    parent = min(ends, key=lambda i: segments[i].position + len(segments[i]))
    start, last = segments[-1].end, segments[parent]
    return Segment(start, start + length, last.position + len(last), parent)


def _segments(links: Sequence[tuple[int, int, int]], total: int) -> Iterator[Segment]:
    """Cut a sequence where an example's own tokens start, and where another example branches off.

    A link has the index in the sequence where an example's own tokens start, the position of the
    first of them in the example, and the index of the token before it, or -1.
    """
    begins = {start: (position, before) for start, position, before in links}
    branches = {before + 1 for _, _, before in links if before >= 0}
    edges = sorted({*begins, *branches, total})
    index: dict[int, int] = {}  # Maps an index in the sequence to the segment that ends there.
    position = 0
    for i, (start, end) in enumerate(pairwise(edges)):
        before = start - 1
        if start in begins:
            position, before = begins[start]
        yield Segment(start, end, position, index[before + 1] if before >= 0 else -1)
        index[end] = i
        position += end - start
