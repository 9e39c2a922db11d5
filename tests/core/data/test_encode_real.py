"""Text to tokens and mask with real tokenizers, read as transformers reads them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.conversation import Conversation, Message
from mlxtune.core.data.encode import OffsetEncoding
from tests.core.data.encoding import converse, encode, supervised_runs
from tests.slow import long


@dataclass(frozen=True)
class RealTokenizer:
    backend: Any
    bos_id: int | None = None

    @property
    def eos_id(self) -> int | None:
        return next(iter(self.control_ids), None)

    @functools.cached_property
    def control_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token for token, written in added.items() if written.special)

    @property
    def control_tokens(self) -> list[str]:
        return [self.backend.id_to_token(token) for token in self.control_ids]

    def encode_batch(self, texts: Sequence[str]) -> list[OffsetEncoding]:
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [OffsetEncoding(encoding.ids, encoding.offsets) for encoding in encodings]


@functools.cache
def load(path: Path, bos_id: int | None = None) -> RealTokenizer:
    library = pytest.importorskip("tokenizers", reason="needs tokenizers to read tokenizer.json")
    return RealTokenizer(library.Tokenizer.from_file(str(path)), bos_id)


@pytest.fixture
def qwen3(shared: Path) -> RealTokenizer:
    return load(shared / "tokenizers" / "qwen3" / "tokenizer.json")


@pytest.fixture
def stories(shared: Path) -> RealTokenizer:
    return load(shared / "models" / "stories260k" / "tokenizer.json", bos_id=1)


def vectors(shared: Path) -> list[tuple[str, list[int]]]:
    stem = shared / "tokenizers" / "vectors" / "ggml-vocab-qwen2.gguf"
    texts = stem.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = stem.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]


def chat_rows(path: Path, every: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().rstrip(b"\n").split(b"\n")[::every]]


# One in `every` rows of each file, the number of these rows, and how many of them use tools.
ROWS = pytest.mark.parametrize(
    ("every", "count", "uses_tools"), [(20, 524, 8), long(1, 10_463, 191)]
)


def as_conversation(row: int, content: dict[str, Any]) -> Conversation:
    messages = (
        Message(m["role"], m.get("content") or "", tuple(m.get("tool_calls") or ()))
        for m in content["messages"]
    )
    return Conversation(row, tuple(messages), tuple(content.get("tools") or ()))


def qwen3_answer(message: dict[str, Any]) -> str:
    """Return a turn as Qwen's documentation shows it: content, then a block for each call."""
    blocks = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        name = call["function"]["name"]
        blocks.append(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(blocks) + "<|im_end|>"


def test_qwen3_ids_equal_llama_cpps_vectors_as_text_and_as_an_answer(
    shared: Path, qwen3: RealTokenizer
) -> None:
    end_of_turn = 151645
    checked = vectors(shared)
    for text, ids in checked:
        assert qwen3.encode_batch([text])[0].ids == ids
        (example,), _, _ = encode(qwen3, converse(("user", text), ("assistant", text)))
        assert supervised_runs(example) == [[*ids, end_of_turn]], repr(text)
    assert len(checked) == 47


def test_qwen3_newlines_at_the_edge_keep_the_tokens_of_the_prompt(qwen3: RealTokenizer) -> None:
    (example,), _, _ = encode(qwen3, converse(("user", "Hi"), ("assistant", "\n\nHello")))

    # 198 and 271 are separate tokens; joined, they would be token 1406.
    assert example.tokens.tolist()[-5:] == [77091, 198, 271, 9707, 151645]
    assert example.assistant_mask.tolist()[-5:] == [0, 0, 1, 1, 1]


def test_qwen3_ids_equal_the_golden_ids(shared: Path, qwen3: RealTokenizer) -> None:
    goldens = json.loads((shared / "templates" / "goldens.json").read_text(encoding="utf-8"))
    empty_thinking = [151667, 271, 151668, 271]
    compared = 0
    for golden in goldens["goldens"]:
        turns = json.dumps(golden["messages"])
        asks = golden["add_generation_prompt"] or golden["messages"][-1]["role"] != "assistant"
        if golden["template_file"] != "qwen3.jinja" or asks or "think" in turns:
            continue
        if "reasoning" in turns:
            continue
        (example,), _, _ = encode(qwen3, as_conversation(1, golden))
        ids = golden["token_ids"]
        at = next(i for i in range(len(ids) - 4, -1, -1) if ids[i : i + 4] == empty_thinking)
        assert example.tokens.tolist() == ids[:at] + ids[at + 4 :], golden["conversation"]
        compared += 1
    assert compared == 10


@ROWS
def test_qwen3_masks_decode_to_the_answers(
    shared: Path, qwen3: RealTokenizer, every: int, count: int, uses_tools: int
) -> None:
    compared = 0
    for path in sorted((shared / "chat").glob("*.jsonl")):
        rows = chat_rows(path, every)
        examples, ledger, _ = encode(
            qwen3, *(as_conversation(i, row) for i, row in enumerate(rows, start=1))
        )
        assert [example.row for example in examples] == list(range(1, len(rows) + 1))
        runs = [supervised_runs(example) for example in examples]
        decoded = iter(
            qwen3.backend.decode_batch([run for r in runs for run in r], skip_special_tokens=False)
        )
        for number, (row, of_row) in enumerate(zip(rows, runs, strict=True), start=1):
            answers = [qwen3_answer(m) for m in row["messages"] if m["role"] == "assistant"]
            assert [next(decoded) for _ in of_row] == answers, f"{path}:{number}"
            compared += 1
        assert ledger.adds_up()
        assert ledger.tokens_supervised == sum(len(run) for of_row in runs for run in of_row)
    assert compared == count


@ROWS
def test_gemma_masks_decode_to_the_answers(
    shared: Path, stories: RealTokenizer, every: int, count: int, uses_tools: int
) -> None:
    # The pieces themselves, because the decoder would strip a space.
    pieces = [stories.backend.id_to_token(i) for i in range(stories.backend.get_vocab_size())]
    encoded = [
        bytes([int(piece[3:5], 16)])
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece)
        else piece.replace("▁", " ").encode()
        for piece in pieces
    ]
    compared = kept = 0
    for path in sorted((shared / "chat").glob("*.jsonl")):
        rows = chat_rows(path, every)
        examples, ledger, skipped = encode(
            stories,
            *(as_conversation(i, row) for i, row in enumerate(rows, start=1)),
            template="gemma",
        )
        kept += ledger.rows_train
        for example in examples:
            answers = [
                m["content"] + "<end_of_turn>"
                for m in rows[example.row - 1]["messages"]
                if m["role"] == "assistant"
            ]
            decoded = [
                b"".join(encoded[i] for i in run).decode() for run in supervised_runs(example)
            ]
            assert decoded == answers, f"{path}:{example.row}"
            assert example.tokens.tolist().count(1) == 1
            assert example.tokens[0] == 1
            compared += 1
        with_tools = sum("tools" in row for row in rows)
        assert dict(skipped.counts) == (
            {"the gemma template does not support tools": with_tools} if with_tools else {}
        )
    assert compared == kept == count - uses_tools
