"""The micro-batches of a step: the examples that run together, and padded ones as arrays.

An example runs up to the token before its last supervised token, and is padded to the width of
the widest example of its micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.encode import Example, forward_tokens

# The number of examples planned together: planning time grows with its square, and planning more
# examples together gains little.
BLOCK_EXAMPLES = 256


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The examples of a micro-batch, as indices into the step's examples.

    `tokens` counts the tokens that run through the model, padding included. `width` is the length
    of the longest example, to which all examples are padded if they are side by side. `added`
    counts the padding tokens at the end of a packed sequence.
    """

    examples: tuple[int, ...]
    width: int
    tokens: int
    added: int = 0

    def padding(self, lengths: Sequence[int]) -> int:
        """Return the number of padding tokens; `lengths` are those of all examples of the step."""
        without_padding = sum(lengths[i] for i in self.examples)
        # Shared prefixes run once, so a sequence may have fewer tokens than its examples.
        return max(self.tokens - self.added - without_padding, 0) + self.added


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """Examples padded on the right to one width, with labels shifted by one token.

    `inputs` and `labels` are int32 of shape (B, T), `mask` is float32 of shape (B, T) and 1 where
    the label carries loss. `row_ids` has the row key of each example, which seeds the example's
    random numbers; `lengths` has each example's number of tokens without padding.
    """

    inputs: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    mask: npt.NDArray[np.float32]
    row_ids: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.mask.sum(axis=1).astype(int).tolist())

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """Each example's tokens without padding: their number, and their first position, 0."""
        return [(length, 0) for length in self.lengths]


def padded_micro_batches(lengths: Sequence[int], max_tokens: int, fixed: int) -> list[MicroBatch]:
    """Divide examples of these lengths into micro-batches at the least cost, the largest first.

    A micro-batch costs its tokens plus `fixed`, in units of one token's time. It runs at most
    `max_tokens` tokens, unless it is a single, longer example. Each example is in exactly one
    micro-batch. Deterministic for given arguments.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    micro_batches: list[MicroBatch] = []
    for begin in range(0, len(order), BLOCK_EXAMPLES):
        selected = order[begin : begin + BLOCK_EXAMPLES]

        def costs(start: int, selected: Sequence[int] = selected) -> Iterator[int]:
            width = lengths[selected[start]]
            for count in range(1, len(selected) - start + 1):
                if count > 1 and count * width > max_tokens:
                    return
                yield fixed + count * width

        for part in cheapest_division(len(selected), costs):
            width = lengths[selected[part.start]]
            members = tuple(selected[i] for i in part)
            micro_batches.append(MicroBatch(members, width, len(part) * width))
    return sorted(micro_batches, key=lambda each: (-each.tokens, each.examples))


def cheapest_division(size: int, costs: Callable[[int], Iterable[float]]) -> list[range]:
    """Cut a sequence into parts at the least total cost; return the parts in reverse order.

    `costs(start)` yields the costs of parts of 1, 2, … items that begin at `start`, up to the
    longest allowed part.
    """
    least, begin = [0.0] + [math.inf] * size, [0] * (size + 1)
    for start in range(size):
        for end, cost in enumerate(costs(start), start + 1):
            if least[start] + cost < least[end]:
                least[end], begin[end] = least[start] + cost, start
    parts, end = [], size
    while end:
        parts.append(range(begin[end], end))
        end = begin[end]
    return parts


def rows_of(row_ids: Iterable[int]) -> list[list[int]]:
    """Return the indices of each row's examples, in order, from the examples' row ids."""
    rows: dict[int, list[int]] = {}
    for i, row_id in enumerate(row_ids):
        rows.setdefault(row_id, []).append(i)
    return list(rows.values())


def collate(examples: Sequence[Example], width: int | None = None) -> PaddedBatch:
    """Pad examples and shift them: each position predicts the token after it.

        tokens           a b c d e      inputs   a b c
        assistant_mask   0 0 1 1 0      labels   b c d
                                        mask     0 1 1

    `pack` lays examples end to end instead. Here, examples are padded to `width`, by default the
    width of the widest example, with token 0 and mask 0. Under causal attention, no real token sees
    the padding.

    Raises ValueError when an example is wider than `width`.
    """
    lengths = [forward_tokens(example) for example in examples]
    shape = (len(examples), max(lengths) if width is None else width)
    inputs, labels = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    mask = np.zeros(shape, dtype=np.float32)
    for i, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        after = slice(1, min(length + 1, len(example)))  # a lone token predicts nothing
        inputs[i, :length] = example.tokens[:length]
        labels[i, : after.stop - 1] = example.tokens[after]
        mask[i, : after.stop - 1] = example.assistant_mask[after]
    row_ids = tuple(example.key for example in examples)
    return PaddedBatch(inputs, labels, mask, row_ids, tuple(lengths))
