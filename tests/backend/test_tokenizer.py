"""Tokenizers as inference tools load them, and tokenizer.model folders as sentencepiece does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece

from mlxtune.backend.tokenizer import load_tokenizer
from mlxtune.errors import ModelError
from tests.models import write_model

TEXTS = ["Hello world", "  two  spaces\n\ttab ", "héllo 🙂\nSELECT * FROM t", "", "<i> x"]


def test_qwen3_vocabulary_gives_the_published_ids(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "qwen3")
    vectors = shared / "tokenizers" / "vectors" / "ggml-vocab-qwen2.gguf"
    texts = vectors.with_suffix(".gguf.inp").read_text(encoding="utf-8")
    texts_list = texts.split("\n__ggml_vocab_test__\n")
    lines = vectors.with_suffix(".gguf.out").read_text().splitlines()
    expected = [[int(token) for token in line.split()] for line in lines]
    encoded = tokenizer.encode_batch(texts_list[: len(expected)])
    assert len(expected) > 40
    assert [encoding.ids for encoding in encoded] == expected
    assert tokenizer.bos_id is None


def test_folder_with_only_a_tokenizer_model_is_read_by_sentencepiece(
    shared: Path, tmp_path: Path
) -> None:
    model = shared / "models" / "stories260k" / "tok512.model"
    shutil.copy(model, tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    tokenizer = load_tokenizer(tmp_path)

    assert tokenizer.bos_id == processor.bos_id() == 1
    assert [e.ids for e in tokenizer.encode_batch(TEXTS)] == processor.encode(TEXTS)


def test_control_tokens_in_the_text_are_parsed(shared: Path, tmp_path: Path) -> None:
    shutil.copy(shared / "models" / "stories260k" / "tok512.model", tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (encoded,) = load_tokenizer(tmp_path).encode_batch(["<s>Once</s>"])
    assert (encoded.ids[0], encoded.ids[-1]) == (1, 2)
    assert (encoded.offsets[0], encoded.offsets[-1]) == ((0, 3), (7, 11))


def test_offsets_of_both_kinds_point_at_the_text(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models" / "stories260k"
    shutil.copy(folder / "tok512.model", tmp_path / "tokenizer.model")
    text = "Once upon a time, José 🙂 said"
    for tokenizer in (load_tokenizer(folder), load_tokenizer(tmp_path)):
        (encoded,) = tokenizer.encode_batch([text])
        assert len(encoded.ids) == len(encoded.offsets)
        covered = {i for start, end in encoded.offsets for i in range(start, end)}
        assert covered == set(range(len(text)))


def test_fast_tokenizer_parses_control_tokens_and_adds_none(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", bos=True)
    tokenizer = load_tokenizer(tmp_path)
    (encoded,) = tokenizer.encode_batch(["<|im_start|>"])
    assert len(encoded.ids) == 1
    assert tokenizer.bos_id is not None


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff\xff\xff"])
def test_broken_tokenizer_model_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.model: is not a SentencePiece model"):
        load_tokenizer(tmp_path)
