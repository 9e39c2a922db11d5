"""The models' own templates: golden renders, and the same prompts as in transformers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.text import chat_template
from mlxtune.backend.text.chat_template import ChatTemplate, TemplateRequest, read_chat_template
from mlxtune.core.data import problems
from mlxtune.core.data.problems import BadRowError
from mlxtune.errors import ModelError
from tests.backend.text.turns import (
    TEMPLATES,
    Folders,
    Template,
    compare,
    special_tokens,
    turns_of,
)
from tests.slow import long, slow_except

ASKED = [{"role": "user", "content": "Hi"}]
# Gemma's tokenizer takes seconds to write.
every_template = pytest.mark.parametrize(
    "template",
    slow_except(TEMPLATES.values(), *(each for each in TEMPLATES.values() if not each.is_gemma)),
    ids=TEMPLATES.keys(),
)


@pytest.fixture(scope="module")
def folders(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(shared, tmp_path_factory.mktemp("folders"))


def goldens(shared: Path) -> list[dict[str, Any]]:
    text = (shared / "templates" / "goldens.json").read_text(encoding="utf-8")
    return list(json.loads(text)["goldens"])


def golden(shared: Path, template: Template, name: str) -> dict[str, Any]:
    return next(
        each
        for each in goldens(shared)
        if each["conversation"] == name and each["template_file"] == template.file
    )


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Renders


def test_every_golden_render_is_equal_and_every_refusal_has_its_reason(
    shared: Path, folders: Folders
) -> None:
    tokenizer = folders["qwen3.jinja"].ours
    seen: Counter[str] = Counter()
    renders: dict[str, tuple[ChatTemplate, Iterator[TemplateRequest]]] = {}
    names = ("messages", "tools", "add_generation_prompt", "enable_thinking")
    for each in goldens(shared):
        template = TEMPLATES[each["template_file"]]
        where = f"{template.file}: {each['conversation']}"
        assert special_tokens(template).get("bos_token") == each.get("bos_token"), where
        if template.file not in renders:
            source = (shared / "templates" / template.file).read_text(encoding="utf-8")
            render = ChatTemplate({"default": source}, special_tokens(template))
            requests = [
                render.request(**{name: other.get(name) for name in names})
                for other in goldens(shared)
                if other["template_file"] == template.file
            ]
            render.start(requests)
            renders[template.file] = render, iter(requests)
        render, started = renders[template.file]
        call, request = {name: each.get(name) for name in names}, next(started)
        if "error" in each:
            with pytest.raises(BadRowError) as raised:
                request.text()
            assert raised.value.kind == "the model's template refuses it"
            assert each["error"].removeprefix("TemplateError: ") in str(raised.value), where
            seen["refused"] += 1
            continue
        rendered = request.text()
        assert rendered == each["rendered"], where
        if not seen["rendered"] % 10:
            assert render.request(**call).text() == rendered, where
        seen["rendered"] += 1
        if "token_ids" in each:
            assert tokenizer.encode_batch([rendered])[0].ids == each["token_ids"], where
            seen["with ids"] += 1

    assert seen == {"rendered": 267, "refused": 26, "with ids": 133}
    assert seen["rendered"] + seen["refused"] == 293


@pytest.mark.long
def test_conversation_refused_by_template_is_skipped_with_its_reason(
    shared: Path, folders: Folders, tmp_path: Path
) -> None:
    refused: Counter[str] = Counter()
    good = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}]}
    for each in goldens(shared):
        if "error" not in each or each["messages"][-1]["role"] != "assistant":
            continue
        data = write_rows(tmp_path / "chat.jsonl", good, {"messages": each["messages"]})
        dataset = folders[each["template_file"]].encode(data)
        reason = each["error"].removeprefix("TemplateError: ")
        (warning,) = dataset.files[0].skipped.warnings()
        assert warning.startswith(f"{data}:2: ")
        # These two conversations are refused earlier: the template has no place for a turn's text.
        if each["conversation"] not in ("assistant_first", "tool_call"):
            assert reason in warning, each["conversation"]
            refused[each["conversation"]] += 1

    assert set(refused) == {
        *("system_user_assistant", "empty_system", "system_in_middle", "consecutive_user"),
        "unicode_emoji",
    }


def test_invalid_template_is_one_error_of_the_model() -> None:
    with pytest.raises(ModelError, match=r"line 1: .*fix it, or name a built-in --template"):
        ChatTemplate({"default": "{% for %}"}, {}).request(ASKED).text()


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages | map('nonsense') | list }}",
        "{{ raise_exception('no') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_template_that_fails_in_any_way_refuses_the_row(source: str) -> None:
    with pytest.raises(BadRowError, match="the model's template refuses it"):
        ChatTemplate({"default": source}, {}).request(ASKED).text()


# The places of a template in a folder


@pytest.mark.parametrize(
    ("files", "sources"),
    [
        ({}, {}),
        ({"tokenizer_config.json": "{}"}, {}),
        ({"tokenizer_config.json": '{"chat_template": null}'}, {}),
        ({"tokenizer_config.json": '{"chat_template": "a"}'}, {"default": "a"}),
        ({"chat_template.jinja": "b"}, {"default": "b"}),
        # The order of precedence in transformers and mlx-lm.
        (
            {"chat_template.jinja": "b", "tokenizer_config.json": '{"chat_template": "a"}'},
            {"default": "b"},
        ),
        (
            {
                "tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "a"},'
                ' {"name": "tool_use", "template": "t"}]}'
            },
            {"default": "a", "tool_use": "t"},
        ),
        (
            {"tokenizer_config.json": '{"chat_template": {"default": "a", "rag": "r"}}'},
            {"default": "a", "rag": "r"},
        ),
        (
            {"chat_template.jinja": "b", "additional_chat_templates/tool_use.jinja": "t"},
            {"default": "b", "tool_use": "t"},
        ),
    ],
)
def test_template_is_read_from_where_transformers_reads_it(
    tmp_path: Path, files: dict[str, str], sources: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_chat_template(tmp_path) == sources


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1]", '{"chat_template": 3}', '{"chat_template": [3]}', "[" * 100_000),
        *('{"chat_template": [{"name": "default"}]}', '{"chat_template": {"default": 3}}'),
        '{"chat_template": [{"name": "rag", "template": "a"}]}',
    ],
)
def test_template_that_cannot_be_read_is_an_error_that_names_the_folder(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match=f"^{tmp_path}:? ") as raised:
        read_chat_template(tmp_path)
    assert "\n" not in str(raised.value)


def test_template_for_tools_is_used_for_conversations_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }} tools"}, {})
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    message = {"role": "user", "content": "Hi"}

    assert template.request([message]).text() == "plain"
    assert template.request([message], tools=[]).text() == "plain"
    assert template.request([message], tools=[tool]).text() == "1 tools"


# Turns


@pytest.fixture(scope="module", params=[(500, 1), long((1, 1))], ids=str)
def some_chat(
    shared: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """One row in `every`, and some of each combination of roles, tools and calls."""
    every, of_each = request.param
    shapes: Counter[Any] = Counter()
    chosen = []
    for path in sorted((shared / "chat").glob("*.jsonl")):
        for i, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n")):
            row = json.loads(line)
            turns = tuple((m["role"], "tool_calls" in m) for m in row["messages"])
            shape = ("tools" in row, turns)
            shapes[shape] += 1
            if i % every == 0 or shapes[shape] <= of_each:
                chosen.append(row)
    assert shapes.total() == 10_463
    return write_rows(tmp_path_factory.mktemp("chat") / "chat.jsonl", *chosen)


# The goldens cover the other templates by default.
@pytest.mark.parametrize(
    "template",
    slow_except(TEMPLATES.values(), TEMPLATES["qwen3.jinja"]),
    ids=TEMPLATES.keys(),
)
def test_turns_follow_the_prompts_that_transformers_gives(
    folders: Folders, some_chat: Path, template: Template
) -> None:
    seen = {mode: compare(folders[template.file], mode, some_chat) for mode in template.modes}
    for counts in seen.values():
        assert counts["rows"] > 30
        assert (counts["refused"] > 5) == (not template.calls)
        assert counts["turns"] > counts["rows"]
        # These templates render all turns of a row in one example.
        if template.file in ("qwen2_5.jinja", "qwen3_instruct_2507.jinja"):
            assert counts["examples"] == counts["rows"]
        # Qwen3's template changes a turn once another follows, so each turn is an example.
        if template.file == "qwen3.jinja":
            assert counts["examples"] == counts["turns"]


@every_template
def test_rows_are_rendered_many_in_one_exchange_with_the_process(
    folders: Folders,
    some_chat: Path,
    template: Template,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    process = chat_template._process()

    def counted(source: str, requests: list[str], original: Any = process.submit) -> Any:
        asked.append(len(requests))
        return original(source, requests)

    monkeypatch.setattr(process, "submit", counted)
    (ledger,) = folders[template.file].encode(some_chat).ledgers
    # A request holds 32 rows; a few more ask for a system message and the header.
    assert len(asked) <= ledger.rows_read / 32 + 1 + 3
    assert sum(asked) > ledger.rows_read


@every_template
@pytest.mark.parametrize("name", ["think_multi_turn", "reasoning_content_field", "think_last"])
def test_thinking_is_supervised_as_the_template_writes_it(
    shared: Path, folders: Folders, template: Template, name: str, tmp_path: Path
) -> None:
    messages = golden(shared, template, name)["messages"]
    if template.file == "diffusion_gemma.jinja":
        # This template omits thinking in tags; servers return thinking in a field instead.
        messages = [_with_thinking_in_field(message) for message in messages]
    data = write_rows(tmp_path / "chat.jsonl", {"messages": messages})
    answers = sum(message["role"] == "assistant" for message in messages)
    for mode in template.modes:
        counts = compare(folders[template.file], mode, data)
        assert counts["turns"] == answers
        (ledger,) = folders[template.file].encode(data, thinking=mode).ledgers
        keeps_it = mode != "off" and (template.in_field or name != "reasoning_content_field")
        dropped = ledger.notes[problems.DROPPED_THINKING]
        assert dropped == (0 if keeps_it else 1)
        assert ledger.notes.keys() <= {problems.DROPPED_THINKING, problems.UNKNOWN_END}


def _with_thinking_in_field(message: dict[str, Any]) -> dict[str, Any]:
    thinking, has_block, text = message["content"].partition("</think>")
    if not has_block:
        return message
    thinking = thinking.removeprefix("<think>").strip()
    return message | {"content": text.strip(), "reasoning_content": thinking}


@pytest.mark.slow
def test_thinking_block_is_written_to_the_channel_of_the_template(
    shared: Path, folders: Folders, tmp_path: Path
) -> None:
    template = TEMPLATES["diffusion_gemma.jinja"]
    messages = golden(shared, template, "think_multi_turn")["messages"]
    in_field = [_with_thinking_in_field(message) for message in messages]
    assert in_field != messages
    match = []
    for each in (messages, in_field):
        data = write_rows(tmp_path / "chat.jsonl", {"messages": each})
        examples = folders[template.file].encode(data).corpus
        match.append([(e.tokens.tolist(), e.assistant_mask.tolist()) for e in examples])

    assert match[0] == match[1]


def test_turns_last_supervises_only_the_last_turn(
    shared: Path, folders: Folders, tmp_path: Path
) -> None:
    messages = golden(shared, TEMPLATES["qwen3.jinja"], "multi_turn")["messages"]
    data = write_rows(tmp_path / "chat.jsonl", {"messages": messages})
    for name, folder in folders.items():
        every, last = (
            list(turns_of(folder.encode(data, turns=turns).corpus)) for turns in ("all", "last")
        )
        assert len(every) == sum(message["role"] == "assistant" for message in messages) == 3, name
        assert last == every[-1:], name


@pytest.mark.slow
def test_system_message_is_merged_where_gemma_refuses_one(
    shared: Path, folders: Folders, tmp_path: Path
) -> None:
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    row = {"messages": [{"role": "system", "content": "Be kind."}, *asked]}
    data = write_rows(tmp_path / "chat.jsonl", row, {"messages": asked})
    folder = folders["gemma.jinja"]

    refused = folder.encode(data)
    assert refused.ledgers[0].rows_skipped.total() == 1
    assert "System role not supported" in next(refused.files[0].skipped.warnings())
    merged = folder.encode(data, merge_system=True)
    assert not merged.ledgers[0].rows_skipped
    assert merged.ledgers[0].notes == {problems.MERGED_SYSTEM: 1}
    expected = folder.prompt([{"role": "user", "content": "Be kind.\n\nHi"}])
    assert next(turns_of(merged.corpus))[0] == expected

    # Gemma 3's own template merges the system message in the same form.
    own = folders["gemma3.jinja"].encode(data, merge_system=True)
    assert not own.ledgers[0].notes
    assert next(turns_of(own.corpus))[0] == expected


@every_template
def test_bos_is_added_once_if_the_model_has_one(
    shared: Path, folders: Folders, template: Template
) -> None:
    folder = folders[template.file]
    bos = folder.ours.bos_id
    assert (bos is not None) == template.is_gemma
    for example in folder.encode(shared / "chat" / "lf_identity.jsonl").corpus:
        assert example.tokens.tolist().count(bos) == int(template.is_gemma)
        assert (example.tokens[0] == bos) == template.is_gemma
