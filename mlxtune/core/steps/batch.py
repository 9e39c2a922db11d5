"""A micro-batch of examples as padded arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.encode import Example


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """Examples padded on the right to one width, with targets shifted by one token.

    `inputs` and `targets` are int32 of shape (B, T), `mask` is float32 of shape (B, T) and 1 where
    the target carries loss. `row_ids` has the row key of each example, which seeds the example's
    random numbers; `lengths` has each example's number of tokens without padding.
    """

    inputs: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    mask: npt.NDArray[np.float32]
    row_ids: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def supervised(self) -> int:
        return int(self.mask.sum())

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.mask.sum(axis=1).astype(int).tolist())

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """Each example's tokens without padding: their number, and their first position, 0."""
        return [(length, 0) for length in self.lengths]


def forward_tokens(example: Example) -> int:
    """Return how many tokens the model must process: those before the last supervised token.

    Later tokens predict nothing that carries loss. The result is at least 1.
    """
    supervised = example.assistant_mask[:0:-1]
    return len(supervised) - int(supervised.argmax()) if supervised.any() else 1


def rows_of(examples: Sequence[Example]) -> list[list[int]]:
    """Return the indices of each row's examples, in order."""
    rows: dict[int, list[int]] = {}
    for i, example in enumerate(examples):
        rows.setdefault(example.key, []).append(i)
    return list(rows.values())


def supervised_tokens(example: Example) -> int:
    """Return the number of supervised tokens after the first token, which nothing predicts."""
    return int(example.assistant_mask[1:].sum())


def collate(examples: Sequence[Example], width: int | None = None) -> PaddedBatch:
    """Pad examples and shift them: each position predicts the token after it.

        tokens           a b c d e      inputs   a b c
        assistant_mask   0 0 1 1 0      targets  b c d
                                        mask     0 1 1

    `pack` lays examples end to end instead. Here, examples are padded to `width`, by default the
    width of the widest example, with token 0 and mask 0. Under causal attention, no real token sees
    the padding.

    Raises ValueError when an example is wider than `width`.
    """
    lengths = [forward_tokens(example) for example in examples]
    shape = (len(examples), max(lengths) if width is None else width)
    inputs, targets = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    mask = np.zeros(shape, dtype=np.float32)
    for i, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        after = slice(1, min(length + 1, len(example)))  # a lone token predicts nothing
        inputs[i, :length] = example.tokens[:length]
        targets[i, : after.stop - 1] = example.tokens[after]
        mask[i, : after.stop - 1] = example.assistant_mask[after]
    row_ids = tuple(example.key for example in examples)
    return PaddedBatch(inputs, targets, mask, row_ids, tuple(lengths))
