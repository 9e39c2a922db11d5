"""What a step trains on, as functions of the seed alone, and how it is laid out in arrays."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from mlxtune.core.encode import Example

Row = tuple[Example, ...]


def group_rows(examples: Sequence[Example]) -> list[Row]:
    """Gather neighbouring examples of the same row, which stand in the same step."""
    return [tuple(group) for _, group in groupby(examples, key=lambda example: example.row)]


def split_rows(
    rows: Sequence[Row], val_split: float, seed: int, val_rows: int
) -> tuple[list[Row], list[Row]]:
    """Split rows into training and validation, both in the order of the file.

    ceil(n * val_split) rows are held out, at most `val_rows` of them, at least one on each side.
    The choice depends on the seed and n alone.

    Raises ValueError with fewer than two rows.
    """
    if len(rows) < 2:
        raise ValueError("a split needs at least two rows")
    held_out = min(math.ceil(len(rows) * val_split), val_rows, len(rows) - 1)
    order = _permutation(len(rows), f"{seed}/split")
    chosen = set(order[:held_out])
    training = [row for i, row in enumerate(rows) if i not in chosen]
    return training, [rows[i] for i in sorted(chosen)]


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
        tokens[:, :-1], tokens[:, 1:], mask[:, 1:], tuple(example.row for example in examples)
    )


def data_hash(rows: Sequence[Row]) -> str:
    """Return `sha256:` over the rows in order: lengths, tokens and masks, little-endian.

    Line numbers are left out: a comment more in the file is the same data.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray([len(row)], dtype="<i8").tobytes())
        for example in row:
            digest.update(np.asarray([len(example)], dtype="<i8").tobytes())
            digest.update(example.tokens.astype("<i4").tobytes())
            digest.update(example.assistant_mask.astype("<u1").tobytes())
    return f"sha256:{digest.hexdigest()}"
