"""Models' own templates as small functions that write the same text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mlxtune.core.data.conversation import Conversation, to_json
from mlxtune.core.data.model_template import ModelTemplate
from mlxtune.core.data.problems import BadRowError
from mlxtune.core.data.sources.messages import parse_conversation
from mlxtune.core.data.template import RenderedText, Rendering

Messages = Sequence[Mapping[str, Any]]
# A template as a function of messages and the options of core's ChatRenderer.
Render = Callable[..., str]
END = "<|im_end|>"
END_TOKENS = (END, "<|endoftext|>")
REFUSED = "the model's template refuses it"


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}{END}\n"


def chatml(messages: Messages, *, tools: Any, add_generation_prompt: bool, **_: Any) -> str:
    """Writes plain ChatML, with tools in a first turn and calls after the content, as JSON."""
    text = turn("system", json.dumps(tools)) if tools else ""
    for message in messages:
        calls = "".join(f"<call>{to_json(c)}</call>" for c in message.get("tool_calls") or ())
        text += turn(message["role"], (message["content"] or "") + calls)
    return text + "<|im_start|>assistant\n" * add_generation_prompt


QWEN3_SOURCE = "{{ enable_thinking }} {{ message.reasoning_content }} {{ '</think>' in content }}"


def qwen3_like(
    messages: Messages,
    *,
    add_generation_prompt: bool,
    enable_thinking: bool | None = None,
    **_: Any,
) -> str:
    """Drops thinking before the last question, and gives every later answer a thinking block."""
    asked = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    text = ""
    for i, message in enumerate(messages):
        content, thought = message["content"], message.get("reasoning_content")
        if message["role"] == "assistant":
            if thought is None:
                thought, _, content = content.rpartition("</think>")
                thought = thought.rpartition("<think>")[2]
            if i > asked:
                content = f"<think>\n{thought.strip()}\n</think>\n\n{content.lstrip()}"
        text += turn(message["role"], content)
    empty = "<think>\n\n</think>\n\n" if enable_thinking is False else ""
    return text + ("<|im_start|>assistant\n" + empty) * add_generation_prompt


R1_SOURCE = "{{ content.split('</think>')[-1] }} <think>"


def r1_like(messages: Messages, *, add_generation_prompt: bool, **_: Any) -> str:
    """Opens the thinking in the prompt, and omits thinking from turns, as DeepSeek-R1 does."""
    text = ""
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            content = content.rpartition("</think>")[2]
        text += turn(message["role"], content)
    return text + "<|im_start|>assistant\n<think>\n" * add_generation_prompt


CHANNEL_SOURCE = "{% if enable_thinking %} {{ message.get('reasoning') }}"


def channelled(
    messages: Messages, *, add_generation_prompt: bool, enable_thinking: bool | None, **_: Any
) -> str:
    """Writes thinking from a field into a channel; the prompt opens a channel if thinking is on."""
    text = ""
    for message in messages:
        thought = message.get("reasoning")
        opened = f"<|channel>thought\n{thought}\n<channel|>" if thought else ""
        text += turn(message["role"], opened + message["content"])
    return (
        text
        + ("<|im_start|>assistant\n" + "<|channel>thought\n" * bool(enable_thinking))
        * add_generation_prompt
    )


def bracketed(messages: Messages, *, add_generation_prompt: bool, **_: Any) -> str:
    """Writes turns in brackets, without a token that ends a turn."""
    text = "".join(f"[{message['role']}] {message['content']}\n" for message in messages)
    return text + "[assistant] " * add_generation_prompt


def prompts_otherwise(messages: Messages, *, add_generation_prompt: bool, **_: Any) -> str:
    """Uses a generation prompt that differs from the text before an answer."""
    text = "".join(turn(message["role"], message["content"]) for message in messages)
    return text + "<|im_start|>model\n" * add_generation_prompt


def refuses_system(messages: Messages, **options: Any) -> str:
    if any(message["role"] == "system" for message in messages):
        raise BadRowError(REFUSED, "System role not supported")
    return chatml(messages, **options)


def drops_system(messages: Messages, **options: Any) -> str:
    return chatml([message for message in messages if message["role"] != "system"], **options)


def ends_twice(messages: Messages, *, add_generation_prompt: bool, **options: Any) -> str:
    """Writes ChatML, and ends the text with a further token unless an answer is requested."""
    text = chatml(messages, add_generation_prompt=add_generation_prompt, **options)
    return text if add_generation_prompt else text + "<|endoftext|>"


RENDERERS: dict[str, tuple[Render, str]] = {
    "chatml": (chatml, ""),
    "qwen3_like": (qwen3_like, QWEN3_SOURCE),
    "r1_like": (r1_like, R1_SOURCE),
    "channelled": (channelled, CHANNEL_SOURCE),
    "bracketed": (bracketed, ""),
    "prompts_otherwise": (prompts_otherwise, ""),
    "refuses_system": (refuses_system, ""),
    "drops_system": (drops_system, ""),
    "ends_twice": (ends_twice, ""),
}


@dataclass
class Request:
    """A call of a template; `started` calls have been made ahead of their use."""

    render: Render
    options: dict[str, Any]
    started: bool = False

    def text(self) -> str:
        return self.render(**self.options)


@dataclass
class Renderer:
    """Renders with a function, and starts the first `most` requests ahead; None starts all."""

    render: Render
    most: int | None = 0
    requests: list[Request] = field(default_factory=list)

    def request(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
        **others: Any,
    ) -> Request:
        options = {"add_generation_prompt": add_generation_prompt, "messages": messages, **others}
        options |= {"tools": tools, "enable_thinking": enable_thinking}
        self.requests.append(Request(self.render, options))
        return self.requests[-1]

    def start(self, requests: Iterable[Request]) -> None:
        for request in islice(requests, self.most):
            request.started = True


def converse(*messages: tuple[str, str] | dict[str, Any], **keys: Any) -> Conversation:
    fields = [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages]
    return parse_conversation(1, {"messages": fields, **keys})


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def render(
    template: Render, conversation: Conversation, source: str | None = None, **options: Any
) -> Rendering:
    if source is None:
        source = next((s for known, s in RENDERERS.values() if known is template), "")
    return ModelTemplate(Renderer(template), END_TOKENS, source, **options)(conversation)


def picture(rendered: RenderedText) -> str:
    r"""Draw the text with `\n` for a newline, and a mark below each supervised character."""
    marks = [" "] * len(rendered.text)
    for start, end in rendered.spans:
        marks[start:end] = "^" * (end - start)
    pairs = [
        (r"\n", mark * 2) if character == "\n" else (character, mark)
        for character, mark in zip(rendered.text, marks, strict=True)
    ]
    return "\n".join(("".join(a for a, _ in pairs), "".join(b for _, b in pairs).rstrip()))


def answers(rendering: Rendering) -> list[str]:
    return [one.text[start:end] for one in rendering.texts for start, end in one.spans]


def prompts(rendering: Rendering) -> list[str]:
    return [one.text[:start] for one in rendering.texts for start, _ in one.spans]


TWO_TURNS = converse(("user", "Hi"), ("assistant", "Hello!"), ("user", "?"), ("assistant", "!"))
