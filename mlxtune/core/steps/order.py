"""Orders the training rows of each epoch: for given data and options, the seed decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import CorpusRows, rows_used
from mlxtune.core.data.held_out import permutation

# Sorting by length may swap rows whose lengths differ by up to this fraction.
_LENGTH_NOISE = 0.1


class RolloutOfStep(NamedTuple):
    """The rollout that a step trains on: its number, from 1, and its first step."""

    number: int
    first: int

    @classmethod
    def of(cls, step: int, updates: int) -> RolloutOfStep:
        """Return the rollout of a step, from 1, with `updates` steps on each rollout."""
        before = (step - 1) // updates
        return cls(before + 1, before * updates + 1)


def rows_of_epoch(rows: CorpusRows, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the indices of the rows that an epoch uses, according to their files' weights.

    With a weight of 2.25, each row is used twice, and a quarter of the rows once more: each epoch
    takes the next quarter in an order that depends on the seed.
    """
    every = np.arange(len(rows), dtype=np.int64)
    if all(weight == 1 for weight in rows.corpus.weights):
        return every
    used = []
    for file, weight in enumerate(rows.corpus.weights):
        rows_of_file = every[rows.file_of_row == file]
        whole, part = rows_used(len(rows_of_file), weight)
        order = np.asarray(permutation(len(rows_of_file), f"{seed}/weight/{file}"), dtype=np.int64)
        following = (np.arange(part) + (epoch - 1) * part) % max(len(rows_of_file), 1)
        used += [*[rows_of_file] * whole, np.sort(rows_of_file[order[following]])]
    return np.concatenate(used)


def shuffled_steps(rows: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the rows of each step of an epoch, in random order; the last step may be smaller.

    Deterministic for given arguments.
    """
    order = permutation(rows, f"{seed}/epoch/{epoch}")
    return [order[start : start + batch_size] for start in range(0, rows, batch_size)]


def steps_by_length(
    lengths: Sequence[int] | npt.NDArray[np.int64], batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return the rows of each step of an epoch: alike in length, with steps in random order.

    `lengths` counts the tokens of each row. If the rows do not fill all steps, one step, chosen at
    random, is smaller. Deterministic for given arguments.
    """
    rng = random.Random(f"{seed}/length/{epoch}")
    # Lengths are jittered, so that batches differ from epoch to epoch.
    noisy = [int(length) * (1 + _LENGTH_NOISE * rng.random()) for length in lengths]
    order = sorted(range(len(noisy)), key=noisy.__getitem__)
    whole, left = divmod(len(order), batch_size)
    short = rng.randrange(whole + 1) * batch_size
    edges = [*range(0, short + 1, batch_size), *range(short + left, len(order) + 1, batch_size)]
    steps = [order[start:end] for start, end in pairwise(edges) if start < end]
    rng.shuffle(steps)
    return steps


def steps_of(
    rows: CorpusRows, batch_size: int, order: str, seed: int, epoch: int
) -> list[list[int]]:
    """Return the rows of each step of an epoch, as indices in `rows`."""
    indices = rows_of_epoch(rows, seed, epoch)
    if order == "length":
        steps = steps_by_length(rows.lengths[indices], batch_size, seed, epoch)
    else:
        steps = shuffled_steps(len(indices), batch_size, seed, epoch)
    return [indices[step].tolist() for step in steps]
