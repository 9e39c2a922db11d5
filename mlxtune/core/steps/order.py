"""Which rows train, and in which order: functions of the seed alone."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import CorpusRows

# Sorting by length may swap rows whose lengths differ by up to this share.
_LENGTH_NOISE = 0.1


def hold_out_rows(
    identities: Sequence[int] | npt.NDArray[np.uint64], val_split: float, seed: int, val_rows: int
) -> tuple[list[int], list[int]]:
    """Return the rows that train and those held out for validation, as indices in their order.

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
    left = wanted
    for i in _permutation(len(which), f"{seed}/split"):
        # Only its first copy is drawn, so that a row with many copies is not drawn more often.
        if first[which[i]] == i and copies[which[i]] <= left:
            chosen[which[i]] = True
            left -= copies[which[i]]
        if left == 0:
            break
    if left == wanted:  # each row has more copies than needed
        chosen[copies.argmin()] = True
    held_out = chosen[which]
    return np.flatnonzero(~held_out).tolist(), np.flatnonzero(held_out).tolist()


def shuffled_steps(rows: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the rows of each step of an epoch, in random order; the last step has the rest.

    A function of the arguments alone.
    """
    order = _permutation(rows, f"{seed}/epoch/{epoch}")
    return [order[start : start + batch_size] for start in range(0, rows, batch_size)]


def steps_by_length(
    lengths: Sequence[int] | npt.NDArray[np.int64], batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return the rows of each step of an epoch, of similar lengths, with the steps shuffled.

    `lengths` are tokens by row. One step, at a random place, has the rows that do not fill a batch.
    A function of the arguments alone.
    """
    draw = random.Random(f"{seed}/length/{epoch}")
    # Lengthened a little at random, so that batches differ from epoch to epoch.
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


def steps_of(
    rows: CorpusRows, batch_size: int, order: str, seed: int, epoch: int
) -> list[list[int]]:
    """Return the places in `rows` of the rows of each step of an epoch."""
    if order == "length":
        return steps_by_length(rows.lengths, batch_size, seed, epoch)
    return shuffled_steps(len(rows), batch_size, seed, epoch)
