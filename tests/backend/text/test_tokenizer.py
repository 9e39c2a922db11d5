"""Tokenizers load as in inference tools; tokenizer.model folders load as in sentencepiece."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from mlxtune.backend.text.tokenizer import (
    FastTokenizer,
    ModelTokenizer,
    SentencePieceTokenizer,
    _panics_as_errors,
    load_tokenizer,
)
from mlxtune.errors import ModelError
from tests.backend.text.turns import load_once
from tests.models import write_model, write_tokenizer
from tests.paths import DATA, SHARED

TEXTS = ["Hello world", "  two  spaces\n\ttab ", "héllo 🙂\nSELECT * FROM t", "", "<i> x"]


def test_qwen3_vocabulary_gives_the_published_ids(shared: Path) -> None:
    tokenizer = load_once(shared / "tokenizers" / "qwen3")
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


def test_fast_tokenizer_parses_control_tokens_and_adds_none(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", bos=True)
    tokenizer = load_tokenizer(tmp_path)
    (encoded,) = tokenizer.encode_batch(["<|im_start|>"])
    assert len(encoded.ids) == 1
    assert tokenizer.bos_id is not None


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff\xff\xff"])
def test_broken_tokenizer_model_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.model is not a SentencePiece model"):
        load_tokenizer(tmp_path)


# Positions: the tokens before a character, and the characters before a token


def hard_texts() -> list[str]:
    """Return texts with several tokens per character, and shared real texts if available."""
    several = [
        "héllo 🙂🏽\nSELECT * FROM t",
        "👩‍👩‍👧 ñandú 北京 עברית  ",
        "\t\n \n",
        "a",
        " ",
        "🙂",
    ]
    vectors = SHARED / "tokenizers" / "vectors" / "ggml-vocab-qwen2.gguf.inp"
    if vectors.is_file():
        several += vectors.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    return [unicodedata.normalize("NFC", text) for text in (*TEXTS, *several)]


@pytest.fixture(params=["qwen3", "stories260k", "tok512", "demo-gemma3", "demo-qwen3", "tiny"])
def every_tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> ModelTokenizer:
    if request.param == "tiny":
        write_tokenizer(tmp_path, bos=True)
        return load_tokenizer(tmp_path)
    if request.param.startswith("demo"):
        return load_tokenizer(DATA / request.param)
    shared = request.getfixturevalue("shared")
    if request.param == "tok512":
        model = shared / "models" / "stories260k" / "tok512.model"
        shutil.copy(model, tmp_path / "tokenizer.model")
        return load_tokenizer(tmp_path)
    kind = "tokenizers" if request.param == "qwen3" else "models"
    return load_once(shared / kind / request.param)


def test_spelled_tokens_are_the_bytes_of_the_text(every_tokenizer: ModelTokenizer) -> None:
    texts = hard_texts()
    control = next(iter(every_tokenizer.control_tokens))
    texts += [f"{control}{text}{control} x" for text in texts]
    prefixed = 0
    for text, encoded in zip(texts, every_tokenizer.encode_batch(texts), strict=True):
        spelled = every_tokenizer.token_bytes(encoded.ids)
        assert len(spelled) == len(encoded.ids)
        assert all(spelled)
        whole = b"".join(spelled)
        # Some SentencePiece vocabularies add a space before a text and after a control token.
        if whole != text.encode():
            prefixed += 1
            assert whole.replace(b" ", b"") == text.replace(" ", "").encode(), repr(text)
            assert len(whole) - len(text.encode()) <= 1 + text.count(control)
    if isinstance(every_tokenizer, FastTokenizer) and every_tokenizer._byte_of is not None:
        assert prefixed == 0


def test_control_token_is_spelled_by_its_text(tmp_path: Path) -> None:
    names = ["<｜User▁says｜>", "<é>", "<0x0A>"]  # as in DeepSeek, not ASCII, and like a byte
    write_tokenizer(tmp_path, extra=names)
    tokenizer = load_tokenizer(tmp_path)
    (encoded,) = tokenizer.encode_batch(["".join(names)])
    assert tokenizer.token_bytes(encoded.ids) == [name.encode() for name in names]


@pytest.mark.parametrize("control", [False, True])
def test_boundaries_and_starts_match_the_bytes(
    every_tokenizer: ModelTokenizer, control: bool
) -> None:
    texts = [text for text in hard_texts() if text.strip()]
    if isinstance(every_tokenizer, SentencePieceTokenizer):
        texts = [text.strip() for text in texts]  # tokenizers may drop spaces at the ends
    if control:
        token = next(iter(every_tokenizer.control_tokens))
        texts = [f"{token}{text}{token}" for text in texts]
    compared = 0
    for text, encoded in zip(texts, every_tokenizer.encode_batch(texts), strict=True):
        assert encoded.boundary(0) == 0
        assert encoded.boundary(len(text)) == len(encoded.ids)
        ids = encoded.ids
        spelled = every_tokenizer.token_bytes(ids)
        if b"".join(spelled) != text.encode():
            # Remove the spaces that the tokenizer added at the start and after control tokens.
            begins = [i == 0 or ids[i - 1] in every_tokenizer.control_ids for i in range(len(ids))]
            spelled = [s.removeprefix(b" " * b) for s, b in zip(spelled, begins, strict=True)]
            if b"".join(spelled) != text.encode():
                continue  # this tokenizer dropped spaces
        compared += 1
        ends = list(accumulate(map(len, spelled), initial=0))
        for character in range(1, len(text)):
            before = len(text[:character].encode())
            # A token that is only an added space belongs to the text after the token.
            expected = ends.index(before) if before in ends else None
            assert encoded.boundary(character) == expected, (text, character)
        for token, end in enumerate(ends[:-1]):
            character = len(text.encode()[:end].decode(errors="ignore"))
            assert encoded.start(token) == character, (text, token)
    assert compared > len(texts) / 2


# Tokens that end a turn


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"config.json": {"eos_token_id": 3}}, ["<start_of_turn>"]),
        ({"config.json": {"eos_token_id": [4, 1]}}, ["<end_of_turn>", "<|im_start|>"]),
        ({"config.json": {"text_config": {"eos_token_id": 4}}}, ["<end_of_turn>"]),
        ({"generation_config.json": {"eos_token_id": [3]}}, ["<start_of_turn>"]),
        (
            {
                "config.json": {"eos_token_id": 3, "text_config": {"eos_token_id": [1]}},
                "generation_config.json": {"eos_token_id": [4, 3]},
            },
            ["<start_of_turn>", "<|im_start|>", "<end_of_turn>"],
        ),
        # Invalid ids are ignored here; loading the config reports them.
        ({"config.json": {"eos_token_id": None, "text_config": 3}}, []),
        ({"config.json": {"eos_token_id": [True, "4", 4.0, -1, 10**9, 10**99]}}, []),
    ],
)
def test_end_tokens_come_from_the_folder_then_the_control_tokens(
    tmp_path: Path, files: dict[str, Any], expected: list[str]
) -> None:
    write_tokenizer(tmp_path, bos=True)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    tokenizer = load_tokenizer(tmp_path)
    names = tokenizer.token_bytes(range(5))
    assert names == [b"<bos>", b"<|im_start|>", b"<|im_end|>", b"<start_of_turn>", b"<end_of_turn>"]
    first = list(dict.fromkeys(["<|im_end|>", *expected]))
    assert list(tokenizer.end_tokens[: len(first)]) == first
    assert set(tokenizer.end_tokens) == {name.decode() for name in names}
    assert len(tokenizer.end_tokens) == 5


def test_sentencepiece_end_tokens_come_from_the_folder(shared: Path, tmp_path: Path) -> None:
    shutil.copy(shared / "models" / "stories260k" / "tok512.model", tmp_path / "tokenizer.model")
    assert load_tokenizer(tmp_path).end_tokens == ("</s>",)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 999, -1]}))
    assert load_tokenizer(tmp_path).end_tokens == ("<s>", "</s>")
    assert load_tokenizer(DATA / "demo-gemma3").end_tokens == ("<eos>", "<end_of_turn>")


def test_special_tokens_are_the_ones_a_template_may_name(shared: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "fast", bos=True)
    names = load_tokenizer(tmp_path / "fast").special_tokens
    assert (names["bos_token"], names["eos_token"]) == ("<bos>", "<|im_end|>")
    assert load_tokenizer(DATA / "demo-gemma3").special_tokens == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    assert "bos_token" not in load_once(shared / "tokenizers" / "qwen3").special_tokens


def test_control_ids_match_the_control_tokens(every_tokenizer: ModelTokenizer) -> None:
    encoded = every_tokenizer.encode_batch(list(every_tokenizer.control_tokens))
    assert {tuple(each.ids) for each in encoded} == {(id_,) for id_ in every_tokenizer.control_ids}
    assert every_tokenizer.control_ids
    if every_tokenizer.bos_id is not None:
        assert every_tokenizer.bos_id in every_tokenizer.control_ids


@pytest.mark.parametrize("files", [(), ("config.json",)])
def test_folder_without_a_tokenizer_is_an_error_that_names_it(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match=f"^{tmp_path}:? .*download it again"):
        load_tokenizer(tmp_path)


def test_gemma_turns_are_between_control_tokens_of_a_tokenizer_model() -> None:
    tokenizer = load_tokenizer(DATA / "demo-gemma3")
    text = "<start_of_turn>user\nHi <b>you</b><end_of_turn>\n"
    (encoded,) = tokenizer.encode_batch([text])
    spelled = tokenizer.token_bytes(encoded.ids)
    control = [
        piece.decode()
        for piece, token in zip(spelled, encoded.ids, strict=True)
        if token in tokenizer.control_ids
    ]
    assert control == ["<start_of_turn>", "<end_of_turn>"]
    assert {"<start_of_turn>", "<end_of_turn>", "<bos>"} <= set(tokenizer.control_tokens)
    assert "\n" not in tokenizer.control_tokens


# Truncation, padding and failures of a folder's tokenizer


def write_changed(folder: Path, **changes: Any) -> Path:
    """Write a tokenizer folder with changes to its tokenizer.json."""
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_tokenizer_folder_cannot_truncate_or_pad_text(tmp_path: Path) -> None:
    # Saved tokenizers can contain padding; at this size, applying it would kill the process.
    padding = {"strategy": {"Fixed": 10**15}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|im_end|>"}
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    plain = load_tokenizer(write_changed(tmp_path / "plain"))
    other = write_changed(tmp_path / "other", padding=padding, truncation=truncation)
    texts = ["What is 1 + 1?", "a"]
    expected = [encoded.ids for encoded in plain.encode_batch(texts)]
    assert len(expected[0]) > 2
    assert [encoded.ids for encoded in load_tokenizer(other).encode_batch(texts)] == expected


def test_tokenizer_that_panics_when_it_is_loaded_is_refused_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_changed(
        tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    )
    with pytest.raises(ModelError, match=r"tokenizer\.json: is damaged \(.*charsmap"):
        load_tokenizer(folder)
    # Rust would print the panic to stderr.
    assert capfd.readouterr().err == ""


def test_panicking_tokenizer_raises_error_with_its_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Matching this pattern takes exponential time.
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    folder = write_changed(tmp_path, pre_tokenizer=split | {"pattern": {"Regex": "(a+)+$"}})
    with pytest.raises(ModelError, match=f"^{folder}: its tokenizer.json is damaged .*retry-limit"):
        load_tokenizer(folder).encode_batch(["a" * 3000 + "b"])
    # Rust would print the panic to stderr.
    assert capfd.readouterr().err == ""


def test_other_stderr_output_while_encoding_is_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with _panics_as_errors("folder"):
        os.write(2, b"of another thread\n")
    assert capfd.readouterr().err == "of another thread\n"
