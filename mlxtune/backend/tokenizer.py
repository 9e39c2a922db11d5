"""A model folder's tokenizer, as the core asks for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from mlx_lm.utils import load_tokenizer as load_with_mlx_lm

from mlxtune.core.encode import Encoded
from mlxtune.errors import ModelError, one_line


class FastTokenizer:
    """A tokenizer of the `tokenizers` library, as transformers and mlx-lm load it."""

    def __init__(self, backend: Any, bos_id: int | None) -> None:
        self._backend = backend
        self.bos_id = bos_id

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts, control tokens parsed and none added."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [Encoded(encoding.ids, encoding.offsets) for encoding in encodings]


class SentencePieceTokenizer:
    """A `tokenizer.model` by itself, read by sentencepiece.

    transformers would convert it to `tokenizers`, and then drops a dummy prefix and invents control
    tokens that the model does not have.
    """

    def __init__(self, path: Path) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        bos_id = self._processor.bos_id()
        self.bos_id = bos_id if bos_id >= 0 else None
        control = filter(self._processor.is_control, range(len(self._processor)))
        self._control_ids = {self._processor.id_to_piece(token): token for token in control}
        self._control = re.compile(f"({'|'.join(map(re.escape, self._control_ids)) or '(?!)'})")

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts, control tokens parsed and none added."""
        # sentencepiece spells out a control token that stands in the text, so it is cut out here.
        parts = [list(filter(None, self._control.split(text))) for text in texts]
        plain = [part for several in parts for part in several if part not in self._control_ids]
        mappings = iter(self._processor.encode(plain, return_type="offset_mapping"))
        return [self._joined(several, mappings) for several in parts]

    def _joined(self, parts: list[str], mappings: Iterator[dict[str, Any]]) -> Encoded:
        encoded, position = Encoded([], []), 0
        for part in parts:
            if part in self._control_ids:
                encoded.ids.append(self._control_ids[part])
                encoded.offsets.append((position, position + len(part)))
            else:
                mapping = next(mappings)
                encoded.ids.extend(mapping["ids"])
                encoded.offsets.extend((position + a, position + b) for a, b in mapping["offsets"])
            position += len(part)
        return encoded


def load_tokenizer(folder: Path) -> FastTokenizer | SentencePieceTokenizer:
    """Load a model folder's tokenizer.

    Raises ModelError when it has none or a broken one.
    """
    spm = folder / "tokenizer.model"
    if spm.is_file() and not (folder / "tokenizer.json").exists():
        try:
            return SentencePieceTokenizer(spm)
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"{spm}: is not a SentencePiece model ({one_line(error)}): download it again"
            ) from error
    try:
        tokenizer = load_with_mlx_lm(folder)
        backend = tokenizer._tokenizer.backend_tokenizer
    except Exception as error:
        raise ModelError(
            f"{folder}: its tokenizer.json or config.json cannot be loaded "
            f"({type(error).__name__}: {one_line(error)}): download it again"
        ) from error
    # transformers makes an empty tokenizer of a folder that has none.
    if not backend.encode("a", add_special_tokens=False).ids:
        raise ModelError(
            f"{folder}: has no tokenizer (tokenizer.json or tokenizer.model): download it again"
        )
    return FastTokenizer(backend, tokenizer.bos_token_id)
