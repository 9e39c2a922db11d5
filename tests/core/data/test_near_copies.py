"""Hashes of texts that near copies share."""

from __future__ import annotations

import numpy as np
import pytest

from mlxtune.core.data.corpus import TextHash, normalise
from mlxtune.core.data.encode import Example

END = 256


class Bytes:
    """A tokenizer with a token for each byte, and one that ends a message."""

    bos_id = eos_id = None
    control_tokens = ("<|im_end|>",)
    control_ids = frozenset({END})

    def spell(self, ids: list[int]) -> list[bytes]:
        return [b"<|im_end|>" if token == END else bytes([token]) for token in ids]


def example(*messages: str, supervised: int = 1) -> Example:
    tokens = np.array([t for text in messages for t in (*text.encode(), END)], dtype=np.int32)
    mask = np.zeros(len(tokens), dtype=np.uint8)
    mask[-supervised:] = 1
    return Example(1, tokens, mask)


@pytest.mark.parametrize(
    "messages",
    [
        (" Where is  the café?", "There"),
        ("Where is\nthe cafe\u0301", "There."),
        ("WHERE IS THE CAFÉ!", "there…"),
        ("Ｗhere is the café?", "There"),
    ],
)
def test_near_copies_have_one_hash_whatever_their_tokens_and_masks(
    messages: tuple[str, str],
) -> None:
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    row = example("Where is the café?", "There.")
    assert hash_of(example(*messages, supervised=3)) == hash_of(row)


@pytest.mark.parametrize(
    "messages",
    [
        ("Where is the café?", "Here."),
        ("Where is the café? There.",),
        ("Where is the cafe?", "There."),
        ("Where is thecafé?", "There."),
    ],
)
def test_other_words_have_another_hash(messages: tuple[str, ...]) -> None:
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    assert hash_of(example(*messages)) != hash_of(example("Where is the café?", "There."))


def test_points_within_numbers_and_names_stay() -> None:
    assert normalise("Run 3.14 of a.txt.  Now!") == "run 3.14 of a.txt now"
