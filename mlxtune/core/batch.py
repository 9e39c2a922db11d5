"""What a step trains on, as functions of the seed alone, and how it is laid out in arrays."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxtune.core.encode import Example


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


def _permutation(n: int, key: str) -> list[int]:
    # Seeded with text, Python's generator gives the same order on every platform and version.
    order = list(range(n))
    random.Random(key).shuffle(order)
    return order


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group examples of a step by length, each group within `max_tokens` tokens after padding.

    Returns indices into `lengths`; each stands in exactly one group. An example longer than
    `max_tokens` stands alone.
    """
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and longest * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = lengths[i]
    return groups


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Examples padded on the right to one length, after the shift.

    `inputs` and `targets` are int32 of shape (B, T), `mask` is float32 of shape (B, T) and 1
    where the target carries loss. `rows` names the example in each line, for its randomness.
    """

    inputs: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    mask: npt.NDArray[np.float32]
    rows: tuple[int, ...]


def collate(examples: Sequence[Example]) -> MicroBatch:
    """Pad examples and shift them: each position predicts the token after it.

        tokens           a b c d      inputs   a b c
        assistant_mask   0 0 1 1      targets  b c d
                                      mask     0 1 1

    This is the only shift. Padding is token 0 with mask 0; under causal attention no token
    before it can see it.
    """
    shape = (len(examples), max(map(len, examples)))
    tokens = np.zeros(shape, dtype=np.int32)
    mask = np.zeros(shape, dtype=np.float32)
    for i, example in enumerate(examples):
        tokens[i, : len(example)] = example.tokens
        mask[i, : len(example)] = example.assistant_mask
    return MicroBatch(
        tokens[:, :-1], tokens[:, 1:], mask[:, 1:], tuple(example.key for example in examples)
    )
