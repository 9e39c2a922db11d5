r"""Renders conversations as the text that the model reads, and marks supervised spans.

    text        <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
    supervised                                                        ^^^^^^^^^^^^^^^^

A span is the content of an assistant turn and the end-of-turn token after it. The header before a
span and the newline after it are context.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from mlxtune.core.data.conversation import (
    ANSWER,
    WHOLE,
    Conversation,
    Message,
    function_name,
    to_json,
)
from mlxtune.core.data.problems import DROPPED_THINKING, BadRowError
from mlxtune.core.data.sources.messages import supervised_turns


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text that becomes an example; `spans` are the supervised [start, end) character ranges.

    The text up to a span is the prompt that inference gives for the span's turn. `add_bos` asks for
    BOS before the tokens of the text, and `add_end` for the end-of-text token after them. `role` is
    the role that the text's examples have in their row.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    add_bos: bool = True
    add_end: bool = False
    role: int = ANSWER

    @property
    def prompt(self) -> str:
        """The text before the first answer."""
        return self.text[: self.spans[0][0]] if self.spans else self.text

    def whole(self) -> "RenderedText":
        """Return the text with loss from its first token to the end of its last answer."""
        return replace(self, spans=((0, self.spans[-1][1]),), role=WHOLE)


@dataclass(frozen=True, slots=True)
class Rendering:
    """The texts of a row: one with every supervised turn in it, or one for each turn.

    `row` is the row's number in its file. `notes` are the kinds of problems in the row, each with a
    detail that may be empty.
    """

    row: int
    texts: tuple[RenderedText, ...]
    notes: Mapping[str, str] = field(default_factory=dict)

    def in_role(self, role: int) -> "Rendering":
        """Return this rendering with the given role for all its texts."""
        return replace(self, texts=tuple(replace(text, role=role) for text in self.texts))


# Renders a conversation, or raises BadRowError.
Template = Callable[[Conversation], Rendering]
# Waits for the rendering of a conversation, or raises BadRowError.
PendingRendering = Callable[[], Rendering]


_TAGGED_TEXT = re.compile(r"\s*<(?P<tag>\w{1,40})>(?P<text>.*)</(?P=tag)>\s*", re.DOTALL)


def _join(parts: Iterable[tuple[str, bool]]) -> RenderedText:
    """Join texts; the flag of each text says whether it carries loss."""
    text, spans = "", []
    for part, supervised in parts:
        if supervised:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return RenderedText(text, tuple(spans))


def without_own_tags(conversation: Conversation, source: str) -> Conversation:
    """Return a conversation whose tool results lack the tags that the template writes around them.

    Hermes's files have the tags in the text, and a template would write them a second time.
    """

    def inner(message: Message) -> Message:
        match = _TAGGED_TEXT.fullmatch(message.content) if message.role == "tool" else None
        if match is None or f"<{match['tag']}>" not in source:
            return message
        text = match["text"].strip()
        return replace(message, content=text, fields={**message.fields, "content": text})

    return replace(conversation, messages=tuple(map(inner, conversation.messages)))


def render_qwen3(conversation: Conversation, turns: str = "all") -> Rendering:
    r"""Render as `<|im_start|>role\ncontent<|im_end|>\n`.

    This is ChatML. Tools, tool calls, tool results and thinking are written as Qwen3's own template
    writes them, except that earlier turns keep their thinking and no empty thinking is added.

    Source: the chat template of Qwen3's tokenizer_config.json.
    """
    conversation = without_own_tags(conversation, "<tool_response>")
    selected = supervised_turns(conversation, turns)
    return Rendering(conversation.row, (_join(_qwen3_parts(conversation, selected)),))


def _qwen3_parts(conversation: Conversation, selected: list[int]) -> Iterator[tuple[str, bool]]:
    messages = conversation.messages
    if conversation.tools:
        system = messages[0].content + "\n\n" if messages[0].role == "system" else ""
        tools = _qwen3_tools(conversation.tools)
        yield f"<|im_start|>system\n{system}{tools}<|im_end|>\n", False
    for i, message in enumerate(messages):
        if i == 0 and conversation.tools and message.role == "system":
            continue
        if message.role == "assistant":
            yield "<|im_start|>assistant\n", False
            yield _qwen3_answer(message) + "<|im_end|>", i in selected
            yield "\n", False
        elif message.role == "tool":
            # Consecutive results share one user turn.
            if i == 0 or messages[i - 1].role != "tool":
                yield "<|im_start|>user", False
            yield f"\n<tool_response>\n{message.content}\n</tool_response>", False
            if i + 1 == len(messages) or messages[i + 1].role != "tool":
                yield "<|im_end|>\n", False
        else:
            yield f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n", False


def _qwen3_tools(tools: tuple[dict[str, Any], ...]) -> str:
    lines = "".join("\n" + to_json(tool) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>{lines}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _qwen3_answer(message: Message) -> str:
    calls = []
    for call in message.tool_calls:
        name = function_name(call)
        if name is None:
            raise BadRowError("a tool call has no function name")
        arguments = (call.get("function") or call).get("arguments", {})
        arguments = arguments if isinstance(arguments, str) else to_json(arguments)
        calls.append(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
    content = message.content
    if message.thinking and not _content_has_thinking(message):
        content = f"<think>\n{message.thinking}\n</think>\n\n{content}"
    return "\n".join([content] * bool(content) + calls)


def _content_has_thinking(message: Message) -> bool:
    thought, closed, _ = message.content.partition("</think>")
    return bool(closed) and message.thinking in thought


def render_gemma(conversation: Conversation, turns: str = "all") -> Rendering:
    r"""Render as `<start_of_turn>user|model\ncontent<end_of_turn>\n`.

    A system message becomes a separate user turn, `[System: content]`. Raises BadRowError for
    tools, which Gemma does not support.

    Source: the chat template of Gemma's tokenizer_config.json, which refuses system messages.
    """
    messages = conversation.messages
    if conversation.tools or any(each.role == "tool" or each.tool_calls for each in messages):
        raise BadRowError("the gemma template does not support tools")
    notes = {}
    for number, message in enumerate(messages, start=1):
        if message.thinking and not _content_has_thinking(message):
            notes[DROPPED_THINKING] = f"message {number}"
    selected = supervised_turns(conversation, turns)
    return Rendering(conversation.row, (_join(_gemma_parts(messages, selected)),), notes)


def _gemma_parts(messages: Iterable[Message], selected: list[int]) -> Iterator[tuple[str, bool]]:
    for i, message in enumerate(messages):
        if message.role == "assistant":
            yield "<start_of_turn>model\n", False
            yield message.content + "<end_of_turn>", i in selected
            yield "\n", False
        else:
            system = message.role == "system"
            content = f"[System: {message.content}]" if system else message.content
            yield f"<start_of_turn>user\n{content}<end_of_turn>\n", False


TEMPLATES: dict[str, Callable[..., Rendering]] = {
    "chatml": render_qwen3,
    "qwen3": render_qwen3,
    "gemma": render_gemma,
}
END_OF_TURN = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "gemma": "<end_of_turn>"}


# The built-in template for base models, which ends answers with the model's own end token.
PLAIN = "plain"


def built_in_jinja(name: str) -> str:
    """Return a built-in template as Jinja text, which renders BOS, then the text of this module.

    There is no function for the plain template: its Jinja text renders it.
    """
    file = f"{name}.jinja" if name in (PLAIN, "gemma") else "chatml.jinja"
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
