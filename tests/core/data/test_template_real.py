"""The built-in templates against the models' own Jinja templates, on real conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mlxtune.core.data import template
from mlxtune.core.data.conversation import Conversation, Message
from mlxtune.core.data.sources.messages import parse_messages
from mlxtune.core.data.template import TEMPLATES, render_gemma, render_qwen3
from tests.core.data.conversations import EMPTY_THINKING, MESSAGES, TOOL, converse, text_of
from tests.slow import slow

# The built-in templates exist as Jinja next to the code that renders them.
DATA_CODE = Path(template.__file__).parent


def jinja(path: Path) -> Callable[[Conversation], str]:
    """Return transformers' renderer: jinja2 with these options and this `tojson`."""
    jinja2 = pytest.importorskip("jinja2", reason="needs jinja2 to render the models' templates")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string(path.read_text(encoding="utf-8"))

    def render(conversation: Conversation) -> str:
        messages = [
            {"role": message.role, "content": message.content}
            | ({"tool_calls": list(message.tool_calls)} if message.tool_calls else {})
            | ({"reasoning_content": message.thinking} if message.thinking else {})
            for message in conversation.messages
        ]
        tools = list(conversation.tools) or None
        return str(compiled.render(messages=messages, tools=tools, bos_token=""))

    return render


def with_a_question_after(conversation: Conversation) -> Conversation:
    """Add a question, so that Qwen3's template adds no thinking to the last assistant turn."""
    messages = (*conversation.messages, Message("user", "And then?"))
    return Conversation(conversation.row, messages, conversation.tools)


def without_last_empty_thinking(text: str) -> str:
    before, _, after = text.rpartition(EMPTY_THINKING)
    return before + after


one_in = pytest.mark.parametrize("every", [slow(1), 29])


def chat(shared: Path, every: int) -> list[tuple[str, Conversation]]:
    """Return one in `every` conversations of all files, each with its file and row."""
    found = []
    for path in sorted((shared / "chat").glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        for i, row in [*enumerate(lines, start=1)][::every]:
            messages, tools = (json.loads(row).get(key) or () for key in ("messages", "tools"))
            found.append((f"{path}:{i}", Conversation(i, parse_messages(messages), tuple(tools))))
    return found


def test_qwen3_equals_its_own_template_for_any_messages(shared: Path) -> None:
    reference = jinja(shared / "templates" / "qwen3.jinja")

    @settings(deadline=None)
    @given(messages=MESSAGES, tools=st.sampled_from([(), (TOOL,), (TOOL, {"é": [1.5, None]})]))
    def check(messages: list[Message], tools: tuple[Any, ...]) -> None:
        # The model's own template drops the text before this tag in earlier turns.
        assume(not any("</think>" in message.content for message in messages))
        conversation = with_a_question_after(converse(*messages, tools=tools))
        assert text_of(render_qwen3(conversation)) == reference(conversation)

    check()


@settings(deadline=None)
@given(
    messages=MESSAGES,
    tools=st.sampled_from([(), (TOOL,), (TOOL, {"é": [1.5, None]})]),
    thinking=st.sampled_from(["", "Hm.", "0"]),
)
@example(messages=[Message("assistant", "Hm.</think>0")], tools=(), thinking="Hm.")
def test_built_in_templates_equal_their_jinja_for_any_messages(
    messages: list[Message], tools: tuple[Any, ...], thinking: str
) -> None:
    thought = [
        replace(message, thinking=thinking * (message.role == "assistant")) for message in messages
    ]
    written = [jinja(DATA_CODE / f"{name}.jinja") for name in ("chatml", "gemma")]
    conversation = converse(*thought, tools=tools)
    assert text_of(render_qwen3(conversation)) == written[0](conversation)
    plain = converse(*(replace(each, tool_calls=()) for each in thought if each.role != "tool"))
    assert text_of(render_gemma(plain)) == written[1](plain)


@one_in
def test_qwen3_equals_its_own_template_on_chat_data(shared: Path, every: int) -> None:
    reference = jinja(shared / "templates" / "qwen3.jinja")
    conversations = chat(shared, every)
    for where, conversation in conversations:
        asked = with_a_question_after(conversation)
        assert text_of(render_qwen3(asked)) == reference(asked), where
        rendered = without_last_empty_thinking(reference(conversation))
        assert text_of(render_qwen3(conversation)) == rendered, where
    assert len(conversations) >= 10_463 / every


@one_in
def test_gemma_equals_its_own_template_on_chat_data_without_tools(shared: Path, every: int) -> None:
    reference = jinja(shared / "templates" / "gemma.jinja")
    compared = 0
    for where, conversation in chat(shared, every):
        roles = [message.role for message in conversation.messages]
        # Gemma's template refuses any other order of turns, and trims text that mlxtune's
        # template keeps.
        if conversation.tools or roles != ["user", "assistant"] * (len(roles) // 2):
            continue
        trimmed = converse(*((m.role, m.content.strip()) for m in conversation.messages))
        assert text_of(render_gemma(trimmed)) == reference(trimmed), where
        compared += 1
    assert compared > 9_800 / every


def test_templates_equal_the_golden_renders(shared: Path) -> None:
    goldens = json.loads((shared / "templates" / "goldens.json").read_text(encoding="utf-8"))
    compared = []
    for golden in goldens["goldens"]:
        name = {"qwen3.jinja": "qwen3", "gemma.jinja": "gemma"}.get(golden["template_file"])
        turns = json.dumps(golden["messages"])
        if name is None or golden["add_generation_prompt"] or "error" in golden:
            continue
        if name == "qwen3" and ("think" in turns or "reasoning" in turns):
            continue  # mlxtune's template keeps thinking as in the data; the model's does not
        messages = [
            Message(m["role"], m.get("content") or "", tuple(m.get("tool_calls") or ()))
            for m in golden["messages"]
        ]
        expected = golden["rendered"].removeprefix(golden.get("bos_token") or "")
        if all(message.role != "assistant" for message in messages):
            messages.append(Message("assistant", "Hm."))
            expected += {
                "qwen3": "<|im_start|>assistant\nHm.<|im_end|>\n",
                "gemma": "<start_of_turn>model\nHm.<end_of_turn>\n",
            }[name]
        elif name == "qwen3" and messages[-1].role == "assistant":
            expected = without_last_empty_thinking(expected)
        conversation = converse(*messages, tools=tuple(golden.get("tools") or ()))
        assert text_of(TEMPLATES[name](conversation)) == expected, golden["conversation"]
        compared.append((name, golden["conversation"]))

    assert len(compared) == len(set(compared)) == 18
