"""The prompt for an answer has exactly the tokens before that answer in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtune.config import DataConfig
from mlxtune.core.data.prompt import TurnEnds, last_turn, parse_content, prompt_of
from mlxtune.errors import DataError
from mlxtune.session.dataset import load_dataset
from mlxtune.session.reader import Reader
from tests.backend.text.turns import TEMPLATES, Folders, turns_of
from tests.models import CHATML, THINKING, write_chat, write_tokenizer
from tests.slow import long_except, slow

ROWS = 12


@pytest.fixture(scope="module")
def folders(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(shared, tmp_path_factory.mktemp("folders"))


def check_file(folder: Path, data: Path, tokenizer: Any = None, **options: Any) -> int:
    """Compare each turn's prompt with its context in training; return the number of turns."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    defaults = {"max_seq_len": 10**9, "val_split": 0, "no_cache": True}
    training = DataConfig(str(folder), str(data), **defaults | options)  # type: ignore[arg-type]
    asking = DataConfig(str(folder), str(data), turns="last", **options)  # type: ignore[arg-type]
    reader, asker = Reader(training, folder), Reader(asking, folder)
    for each in (reader, asker):
        if tokenizer is not None:
            each.tokenizer = tokenizer  # loading it again would take seconds
    dataset, seen = load_dataset(training, reader), 0
    for row in dataset.corpus.select():
        content = rows[row[0].row - 1]
        messages = content["messages"]
        turns = list(turns_of(row))
        positions = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
        assert len(turns) == len(positions)
        for position, (context, answer) in zip(positions, turns, strict=True):
            before = {**content, "messages": messages[:position]}
            prompt = prompt_of(asker.encoder, before, "here")
            assert list(prompt.ids) == context, f"{data}:{row[0].row}, message {position + 1}"
            # After a tool call, Gemma 4 ends the turn with a different one of its eos_ids.
            assert messages[position].get("tool_calls") or prompt.end == answer[-1]
            seen += 1
        # `--generate` answers a row's last turn.
        asked = last_turn(row, TurnEnds(reader.tokenizer.control_ids))
        assert asked is not None
        assert ([*asked.prompt.ids], [*asked.answer, asked.prompt.end]) == turns[-1]
    return seen


@pytest.mark.parametrize("file", [slow("gsm8k_train.jsonl"), "lf_glaive_toolcall_en.jsonl"])
@pytest.mark.parametrize("name", long_except(TEMPLATES, "qwen3.jinja"))
def test_models_own_templates_on_real_chats(
    shared: Path, folders: Folders, tmp_path: Path, name: str, file: str
) -> None:
    folder, source = folders[name], shared / "chat" / file
    lines = source.read_text(encoding="utf-8").splitlines()
    if not folder.template.calls:
        lines = [line for line in lines if '"tool_calls"' not in line]
    if not lines:
        pytest.skip("every conversation calls a tool, and the template has no place for that")
    data = tmp_path / "chat.jsonl"
    data.write_text("\n".join(lines[:ROWS]) + "\n", encoding="utf-8")
    modes = ("on", "off") if folder.template.asks_for_thinking else ("auto",)
    for mode in modes:
        assert check_file(folder.path, data, folder.ours, thinking=mode) >= ROWS / 2


@pytest.mark.parametrize("source", [CHATML, THINKING, None], ids=["chatml", "thinking", "built-in"])
@pytest.mark.parametrize("bos", [slow(False), True])
def test_tiny_templates_and_the_built_in_ones(
    tmp_path: Path, source: str | None, bos: bool
) -> None:
    write_tokenizer(tmp_path / "model", bos=bos)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    if source is not None:
        (tmp_path / "model" / "chat_template.jinja").write_text(source)
    two = [("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4")]
    thought = {"role": "assistant", "content": "Six.", "reasoning_content": "3 + 3"}
    rows = [
        [*two, ("user", "3 + 3?"), ("assistant", "6")],
        [("user", "Hi"), ("assistant", " Hello ")],
        {"messages": [{"role": "user", "content": "3 + 3?"}, thought]},
    ]
    data = write_chat(tmp_path / "chat.jsonl", rows if source != THINKING else rows[:2])
    templates = ("auto",) if source else ("qwen3", "gemma")
    for template in templates:
        assert check_file(tmp_path / "model", data, template=template) >= 3


def test_end_text_without_a_token_is_matched_as_text(tmp_path: Path, shared: Path) -> None:
    model = shared / "models" / "stories260k"
    config = DataConfig(str(model), "none", turns="last", template="gemma")  # type: ignore[arg-type]
    content = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = prompt_of(Reader(config, model).encoder, content, "here")
    assert (prompt.end, prompt.end_text) == (None, "<end_of_turn>")


# Invalid conversations


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "f.json: not valid JSON (Expecting value at column 1)"),
        (
            b'[{"role": "user"\n',
            "f.json: not valid JSON (Expecting ',' delimiter at line 2",
        ),
        (b"\xff\xfe", "f.json: not UTF-8 (byte 1: save the file in UTF-8)"),
        (b"3", "f.json is a number: pass a list of messages"),
        (b'{"messages": []}\n{"messages": []}', "f.json: not valid JSON (Extra data at line 2"),
        (b"[" * 100_000, "f.json: JSON nested too deeply"),
    ],
)
def test_file_that_holds_no_conversation_is_named_with_its_line(content: bytes, said: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_content(content, "f.json")
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "there is no message"),
        ({}, "'messages' is not a list (an object)"),
        ([{"role": "user"}], "content is not text (message 1: null)"),
        ([{"role": "bard", "content": "x"}], "unknown role (message 1: 'bard'"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "the last message is the assistant's",
        ),
        ([{"role": "user", "content": "\ud800"}], "text contains half a surrogate pair"),
    ],
)
def test_unanswerable_conversation_names_the_reason(
    tmp_path: Path, messages: Any, said: str
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    config = DataConfig(str(tmp_path), "none", turns="last")  # type: ignore[arg-type]
    with pytest.raises(DataError) as raised:
        prompt_of(Reader(config, tmp_path).encoder, {"messages": messages}, "f.json")
    assert str(raised.value).startswith(f"f.json: {said}")


def test_row_whose_answer_was_cut_off_or_has_no_prompt_is_not_asked(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    rows = [
        [("user", "Hi"), ("assistant", "a long answer " * 9)],
        [("user", "Hi"), ("assistant", "a")],
    ]
    data = write_chat(tmp_path / "chat.jsonl", rows)
    config = DataConfig(str(tmp_path), str(data), max_seq_len=24, val_split=0, no_cache=True)  # type: ignore[arg-type]
    reader = Reader(config, tmp_path)
    ends = reader.tokenizer.control_ids
    found = [last_turn(row, TurnEnds(ends)) for row in load_dataset(config, reader).corpus.select()]
    assert [each is None for each in found] == [True, False]
    text = write_chat(tmp_path / "text.jsonl", [{"text": "Once upon a time"}])
    config = DataConfig(str(tmp_path), str(text), val_split=0, no_cache=True)  # type: ignore[arg-type]
    (row,) = load_dataset(config, Reader(config, tmp_path)).corpus.select()
    assert last_turn(row, TurnEnds(ends)) is None
