"""What a step trains on, as functions of the seed alone, and how it is laid out in arrays."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mlxtune.core.encode import Example

# Rows of lengths that differ by so much, as a share, may change places when sorted by length.
_LENGTH_NOISE = 0.1


def split_rows(
    identities: Sequence[int] | npt.NDArray[np.uint64], val_split: float, seed: int, val_rows: int
) -> tuple[list[int], list[int]]:
    """Split rows into training and validation, both as indices in the order of the file.

    ceil(n * val_split) rows are held out, at most `val_rows` of them, at least one on each side.
    Rows of equal identity stay on one side, for which fewer may be held out. The choice depends on
    the seed, n and which rows are equal.

    Raises ValueError when there are no two rows that differ.
    """
    _, first, which, copies = np.unique(
        np.asarray(identities, dtype=np.uint64),
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    which = which.reshape(-1)
    if len(copies) < 2:
        raise ValueError("a split needs at least two rows that differ")
    wanted = min(math.ceil(len(which) * val_split), val_rows, len(which) - 1)
    chosen = np.zeros(len(copies), dtype=bool)
    room = wanted
    for i in _permutation(len(which), f"{seed}/split"):
        # Drawn by its first copy, so that a row with many is not drawn more often.
        if first[which[i]] == i and copies[which[i]] <= room:
            chosen[which[i]] = True
            room -= copies[which[i]]
        if room == 0:
            break
    if room == wanted:  # each row has more copies than are wanted
        chosen[copies.argmin()] = True
    held_out = chosen[which]
    return np.flatnonzero(~held_out).tolist(), np.flatnonzero(held_out).tolist()


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the rows in an epoch, a function of the seed and the epoch alone."""
    return _permutation(rows, f"{seed}/epoch/{epoch}")


def shuffled_steps(rows: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the rows of each step of an epoch: `epoch_order`, the last step what is left."""
    order = epoch_order(rows, seed, epoch)
    return [order[start : start + batch_size] for start in range(0, rows, batch_size)]


def steps_by_length(
    lengths: Sequence[int] | npt.NDArray[np.int64], batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return the rows of each step of an epoch, which are of about one length; steps shuffled.

    `lengths` are tokens by row. One step, anywhere, has the rows that do not fill a batch. A
    function of the arguments alone.
    """
    draw = random.Random(f"{seed}/length/{epoch}")
    # Lengthened a little by chance, so that the same rows do not meet in every epoch.
    drawn = [int(length) * (1 + _LENGTH_NOISE * draw.random()) for length in lengths]
    order = sorted(range(len(drawn)), key=drawn.__getitem__)
    whole, left = divmod(len(order), batch_size)
    short = draw.randrange(whole + 1) * batch_size
    edges = [*range(0, short + 1, batch_size), *range(short + left, len(order) + 1, batch_size)]
    steps = [order[start:end] for start, end in pairwise(edges) if start < end]
    draw.shuffle(steps)
    return steps


def _permutation(n: int, key: str) -> list[int]:
    # Seeded with text, Python's generator gives the same order on every platform and version.
    order = list(range(n))
    random.Random(key).shuffle(order)
    return order


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Examples padded on the right to one width, after the shift.

    `prefix` is int32 of shape (P,): the tokens that all lines begin with, which run before
    `inputs` and carry no loss; empty for none. `inputs` and `targets` are int32 of shape (B, T),
    `mask` is float32 of shape (B, T) and 1 where the target carries loss. `rows` names the example
    in each line, for its randomness, `lengths` how many of its tokens are no padding.
    """

    prefix: npt.NDArray[np.int32]
    inputs: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    mask: npt.NDArray[np.float32]
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def supervised(self) -> int:
        """How many targets carry loss."""
        return int(self.mask.sum())

    @property
    def counts(self) -> tuple[int, ...]:
        """How many targets of each example carry loss."""
        return tuple(self.mask.sum(axis=1).astype(int).tolist())

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """The real tokens that run one after the other, each with how many stand before them."""
        prefix = len(self.prefix)
        return [*([(prefix, 0)] if prefix else []), *((length, prefix) for length in self.lengths)]


def run_length(example: Example) -> int:
    """Return how many tokens of an example are run: those before its last supervised token.

    What comes after these predicts nothing that carries loss. At least 1.
    """
    supervised = example.assistant_mask[:0:-1]
    return len(supervised) - int(supervised.argmax()) if supervised.any() else 1


def collate(examples: Sequence[Example], prefix: int = 0, width: int | None = None) -> MicroBatch:
    """Pad examples and shift them: each position predicts the token after it.

        tokens           a b c d e      inputs   a b c
        assistant_mask   0 0 1 1 0      targets  b c d
                                        mask     0 1 1

    This is the only shift. The first `prefix` tokens are taken off as what all share; the rest is
    padded to `width`, by default that of the widest, with token 0 and mask 0. Under causal
    attention no token before the padding can see it.

    Raises ValueError when the examples do not share the prefix, when a token that it predicts
    carries loss, or when a rest is empty or wider than `width`.
    """
    runs = [run_length(example) for example in examples]
    shared = examples[0].tokens[:prefix]
    for example, run in zip(examples, runs, strict=True):
        if run <= prefix or not np.array_equal(example.tokens[:prefix], shared):
            raise ValueError(f"row {example.row} does not begin with the prefix of its group")
        if example.assistant_mask[1 : prefix + 1].any():
            raise ValueError(f"row {example.row} has a supervised token in its prefix")
    shape = (len(examples), max(runs) - prefix if width is None else width)
    inputs, targets = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    mask = np.zeros(shape, dtype=np.float32)
    for i, (example, run) in enumerate(zip(examples, runs, strict=True)):
        after = slice(prefix + 1, min(run + 1, len(example)))  # a lone token predicts none
        inputs[i, : run - prefix] = example.tokens[prefix:run]
        targets[i, : after.stop - after.start] = example.tokens[after]
        mask[i, : after.stop - after.start] = example.assistant_mask[after]
    rows = tuple(example.key for example in examples)
    lengths = tuple(run - prefix for run in runs)
    return MicroBatch(shared, inputs, targets, mask, rows, lengths)
