r"""A model's own chat template: the prompts of inference, and the answers that must follow.

A turn's prompt is the messages before it, rendered with the generation prompt; its answer is the
text that follows that prompt when the turn is rendered too.

    prompt  <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    turn    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
    answer                                                        ^^^^^^^^^^^^^^^^

If the rendering of the whole conversation starts with every turn's prompt and answer, it shows each
turn as inference will, and one example holds them all. If not (Qwen3 drops earlier thinking, and
writes an empty think block into the last turn only), each turn is a separate example.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Protocol

from mlxtune.core.data.conversation import THINKING_FIELDS, Conversation, Message, function_name
from mlxtune.core.data.problems import (
    DROPPED_CONTENT,
    DROPPED_SYSTEM,
    DROPPED_THINKING,
    DROPPED_TOOLS,
    MERGED_SYSTEM,
    NO_END_OF_TURN,
    NO_PROMPT,
    BadRow,
)
from mlxtune.core.data.template import (
    END_OF_TURN,
    PendingRendering,
    Rendered,
    Rendering,
    supervised_turns,
)

_END_THINK = "</think>"
# The tags that open thinking in a generation prompt, and close it before the answer.
_THINKING = (("<think>", "\n</think>\n\n"), ("<|channel>thought", "\n<channel|>"))
_PROBE = "mlxtune asks whether this is shown"
# Each turn is rendered with all messages before it, so many short turns would take minutes. The
# maximum number of characters to render in all, and the number to add for each message.
_MOST_RENDERED, _PER_MESSAGE = 2**27, 64


# The arguments of a RenderChat.
RenderCall = dict[str, Any]
# Waits for the text of a RenderCall, or raises BadRow.
PendingText = Callable[[], str]


class RenderChat(Protocol):
    """The template itself, as transformers renders it."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        enable_thinking: bool | None,
    ) -> str:
        """Render messages. Raises BadRow with the template's own reason if it refuses them."""


@dataclass(frozen=True)
class _TurnRequest:
    """A turn's message as rendered, and its pending prompt and text."""

    message: Message
    prompt: PendingText
    text: PendingText


@dataclass(frozen=True)
class _Prepared:
    """A conversation in the layout that a template expects, and the requests of its turns so far.

    `first` is the position of its first message as shown to the user, who also counts a merged
    message. `requests` are by position.
    """

    conversation: Conversation
    first: int
    notes: dict[str, str]
    requests: dict[int, _TurnRequest] = field(default_factory=dict)


@dataclass(frozen=True)
class _Turn:
    """One assistant turn; `text` is the prompt and the answer, perhaps with a newline after them.

    `unknown_end` is the text that ends the answer if no token does, with a remedy.
    """

    prompt: str
    answer: str
    text: str
    unknown_end: str

    @property
    def rendered(self) -> Rendered:
        shown = self.prompt + self.answer
        return Rendered(shown, ((len(self.prompt), len(shown)),), add_bos=False)


@dataclass(frozen=True)
class ModelTemplate:
    """Renders conversations with a model's own template.

    `end_tokens` are the control tokens that may end a turn. `source` is the template's text, which
    shows how it supports thinking. `turns`, `thinking` and `merge_system` are options. If given,
    `render_ahead` starts calls of `render`, as many of the first calls as it chooses.
    """

    render: RenderChat
    end_tokens: tuple[str, ...]
    source: str = ""
    turns: str = "all"
    thinking: str = "auto"
    merge_system: bool = False
    render_ahead: Callable[[Iterator[RenderCall]], Sequence[PendingText]] = lambda calls: ()

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        longest_first = sorted(filter(None, self.end_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _shows_system(self) -> bool:
        messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hi"}]
        try:
            return _PROBE in self.render(**_call(messages, asks=True))
        except BadRow:
            return False

    @cached_property
    def _thinking_field(self) -> str | None:
        read = (name for name in THINKING_FIELDS if re.search(rf"[.'\"]{name}\b", self.source))
        return next(read, None)

    @cached_property
    def _header(self) -> str:
        """The text that the generation prompt adds; Gemma 4 leaves it out after a tool's result."""
        question = [{"role": "user", "content": _PROBE}]
        try:
            before, prompt = (self.render(**_call(question, asks=asks)) for asks in (False, True))
        except BadRow:
            return ""
        return prompt[len(before) :] if prompt.startswith(before) else ""

    def __call__(self, conversation: Conversation) -> Rendering:
        """Return one text with every supervised turn, or one text for each turn.

        Raises BadRow if the template refuses the conversation or an answer cannot be located.
        """
        return self._rendering(self._prepare(conversation))

    def start(self, conversations: Iterable[Conversation]) -> list[PendingRendering]:
        """Start to render conversations; return a function for each that waits for its rendering.

        The functions raise the errors of rendering.
        """
        started: list[_Prepared] = []
        pending: list[PendingRendering] = []
        for conversation in conversations:
            try:
                started.append(self._prepare(conversation))
            except BadRow:  # rendering the conversation raises the same error
                pending.append(partial(self, conversation))
            else:
                pending.append(partial(self._rendering, started[-1]))
        turns: list[tuple[_Prepared, int, Message]] = []
        texts = iter(self.render_ahead(self._calls(started, turns)))
        for (prepared, position, message), prompt, text in zip(turns, texts, texts, strict=False):
            prepared.requests[position] = _TurnRequest(message, prompt, text)
        return pending

    def _calls(
        self, started: Iterable[_Prepared], turns: list[tuple[_Prepared, int, Message]]
    ) -> Iterator[RenderCall]:
        """Yield the calls for each turn's prompt and text, and add the turn to `turns`."""
        for prepared in started:
            with suppress(BadRow):  # rendering the conversation raises the same error
                chosen = supervised_turns(prepared.conversation, self.turns)
                for position in filter(None, chosen):
                    message, *calls = self._calls_of_turn(prepared.conversation, position)
                    turns.append((prepared, position, message))
                    yield from calls

    def _rendering(self, prepared: _Prepared) -> Rendering:
        try:
            turns = list(self._turns(prepared))
        except BadRow as problem:
            if prepared.conversation.messages[0].role != "system" or self._shows_system:
                raise
            raise BadRow(problem.kind, f"{problem.detail}: try --merge-system") from problem
        texts = tuple(turn.rendered for turn in turns)
        whole = turns[-1].text
        if all(whole.startswith(each.text) for each in texts):
            spans = tuple(span for each in texts for span in each.spans)
            texts = (Rendered(whole, spans, add_bos=False),)
        return Rendering(texts, prepared.notes)

    def _prepare(self, conversation: Conversation) -> _Prepared:
        """Put a conversation into the layout that the template expects."""
        messages, notes = conversation.messages, dict[str, str]()
        if messages[0].role == "system" and not self._shows_system:
            if messages[0].content.strip():
                notes[MERGED_SYSTEM if self.merge_system else DROPPED_SYSTEM] = ""
            if self.merge_system:
                messages = _merged(messages)
        first = 1 + len(conversation.messages) - len(messages)
        messages = tuple(map(self._with_thinking_once, messages))
        return _Prepared(replace(conversation, messages=messages), first, notes)

    def _with_thinking_once(self, message: Message) -> Message:
        """Put the thinking into the field that the template reads, and only there."""
        name, content = self._thinking_field, message.content
        given = [field for field in THINKING_FIELDS if message.fields.get(field)]
        tagged = _END_THINK in content
        if (
            name is None
            or not message.thinking
            or (given == [name] and not tagged)
            or (tagged and not given and _END_THINK in self.source)
            # The two thoughts differ, so keep both.
            or (tagged and message.thinking not in content)
        ):
            return message
        fields: dict[str, Any] = dict.fromkeys(given) | {name: message.thinking}
        return _with_content(message, _without_tags(content), **fields)

    def _turns(self, prepared: _Prepared) -> Iterator[_Turn]:
        conversation, notes = prepared.conversation, prepared.notes
        messages = conversation.messages
        chosen = supervised_turns(conversation, self.turns)
        _check_cost(messages, chosen)
        for position in chosen:
            message, where = messages[position], f"message {position + prepared.first}"
            try:
                turn = self._turn(prepared, position, where)
            except BadRow:
                has_prompt = any(each.role in ("user", "tool") for each in messages[:position])
                if has_prompt or position == chosen[-1]:
                    raise
                notes[NO_PROMPT] = ""
                continue
            if turn.unknown_end:
                notes[NO_END_OF_TURN] = turn.unknown_end
            content = _content_after_thinking(message)
            # The content comes last and may quote the thinking, so look for thinking outside it.
            parts = turn.answer.rpartition(content) if content else (turn.answer, "", "")
            if message.tool_calls and content and not parts[1]:
                notes[DROPPED_CONTENT] = where
            if message.thinking and not any(message.thinking in part for part in parts[::2]):
                notes[DROPPED_THINKING] = where
            yield turn
        tool = function_name(conversation.tools[0]) if conversation.tools else None
        if tool is not None and tool not in turn.prompt:
            notes[DROPPED_TOOLS] = ""

    def _turn(self, prepared: _Prepared, position: int, where: str) -> _Turn:
        if position == 0:
            # Inference never generates a turn without a message before it.
            raise BadRow("the conversation is an assistant turn without a prompt before it")
        request = prepared.requests.pop(position, None)
        if request is None:
            message, *calls = self._calls_of_turn(prepared.conversation, position)
            request = _TurnRequest(message, *(partial(self.render, **call) for call in calls))
        message, header = request.message, self._header
        prompt, text = request.prompt(), request.text()
        if not text.startswith(prompt):
            text = _continue_thinking(prompt, text, message, header, where)
        rest = text[len(prompt) :]
        if not prompt.endswith(header):
            rest = rest.removeprefix(header)
        end, unknown_end = self._end(rest, message)
        answer = rest[:end]
        # The thinking and the content may also name the tool, so both are left out.
        shown = self._ends.sub("", answer)
        for text in (message.thinking, _content_after_thinking(message)):
            shown = shown.replace(text, "", 1)
        for call in message.tool_calls:
            name = function_name(call)
            if name is None:
                raise BadRow("a tool call has no function name", where)
            if name not in shown:
                remedy = "name a template that writes tool calls"
                if END_OF_TURN["qwen3"] in self.end_tokens:
                    remedy += ", such as --template qwen3"
                raise BadRow("the model's template leaves out a tool call", f"{where}: {remedy}")
        return _Turn(prompt, answer, prompt + rest, unknown_end)

    def _end(self, rest: str, message: Message) -> tuple[int, str]:
        """Return where the answer at the start of `rest` ends, after its end-of-turn token.

        If no token ends the answer, it ends after the text that follows its content; this text is
        returned too, with a remedy.
        """
        ends = [match.span() for match in self._ends.finditer(rest)]
        last = ends[-1][1] if ends else 0
        # The thinking comes first, then the content, then the tool calls. The end is the first
        # control token after the content or, with tool calls, the last control token of the
        # rendering.
        content = _content_after_thinking(message)
        if content and not message.tool_calls:
            at = rest.rfind(content)
            while at >= 0:
                stop = at + len(content)
                after = [end for start, end in ends if start >= stop]
                # An answer such as "end" or "<" may also occur inside a control token, or reach
                # into one.
                cuts = any(
                    start < at < end or start < stop < end or (start, end) == (at, stop)
                    for start, end in ends
                )
                if after and not cuts:
                    return after[0], ""
                # An end token within the content does not end the turn.
                last = last if cuts else 0
                at = rest.rfind(content, 0, stop - 1)
        if last:
            return last, ""
        head, found, tail = rest.rstrip().rpartition(content or _PROBE)
        known = list(filter(None, self.end_tokens))[:4]
        remedy = f": let the template end each answer with {known[0]}" if known else ""
        if found and tail and not message.tool_calls:
            return len(head + found + tail), f"{tail.lstrip()}{remedy}"
        raise BadRow("no end-of-turn token", f"looked for {', '.join(known) or 'none'}{remedy}")

    def _calls_of_turn(
        self, conversation: Conversation, position: int
    ) -> tuple[Message, RenderCall, RenderCall]:
        """Return a turn's message as rendered, and the arguments to render its prompt and text."""
        thinks = self._thinks(conversation)
        message, tools = conversation.messages[position], conversation.tools
        if thinks is False and message.thinking:
            present = [name for name in THINKING_FIELDS if name in message.fields]
            content = _without_tags(message.content)
            message = _with_content(message, content, **dict.fromkeys(present))
        before = [each.fields for each in conversation.messages[:position]]
        asked = _call(before, tools, thinks, asks=True)
        return message, asked, _call([*before, message.fields], tools, thinks)

    def _thinks(self, conversation: Conversation) -> bool | None:
        """Return `enable_thinking` for the template; None if the template does not read it."""
        if "enable_thinking" not in self.source:
            return None
        if self.thinking != "auto":
            return self.thinking == "on"
        return any(message.thinking for message in conversation.messages)


def _call(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    thinks: bool | None = None,
    *,
    asks: bool = False,
) -> RenderCall:
    return {
        "messages": messages,
        "tools": tools or None,
        "add_generation_prompt": asks,
        "enable_thinking": thinks,
    }


def _check_cost(messages: Sequence[Message], turns: Sequence[int]) -> None:
    """Raise BadRow for a conversation whose turns take too long to render one by one."""
    ends = [0, *accumulate(map(_size, messages))]
    cost = sum(ends[turn] + ends[turn + 1] for turn in turns)
    if cost > _MOST_RENDERED:
        raise BadRow(
            "it has too many turns to render",
            f"{len(messages):,} messages, {cost:,} characters in all: split the conversation",
        )


def _size(message: Message) -> int:
    try:
        fields = len(str(message.fields))
    except RecursionError as error:
        raise BadRow("JSON nested too deeply") from error
    return max(fields, len(message.content) + len(message.thinking)) + _PER_MESSAGE


def _merged(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    system, *others = messages
    if not system.content.strip():
        return tuple(others)
    for i, message in enumerate(others):
        if message.role == "user":
            others[i] = _with_content(message, f"{system.content}\n\n{message.content}")
            return tuple(others)
    raise BadRow("a system message with no user turn to merge it into")


def _with_content(message: Message, content: str, **fields: Any) -> Message:
    fields = {**message.fields, "content": content, **fields}
    present = {name: value for name, value in fields.items() if value is not None}
    return replace(message, content=content, fields=present)


def _without_tags(content: str) -> str:
    _, tag, answer = content.partition(_END_THINK)
    return answer.lstrip("\n") if tag else content


def _continue_thinking(prompt: str, text: str, message: Message, header: str, where: str) -> str:
    """Return the turn's text as the continuation of a prompt that has opened the thinking.

    Some templates (DeepSeek-R1's) write the opening tag in the generation prompt but not in turns.

    Raises BadRow if the prompt differs from the turn in any other way.
    """
    for opening, closing in _THINKING:
        head, opened, after = prompt.rpartition(opening)
        if opened and not after.strip() and text.startswith(head):
            rest = text[len(head) :].removeprefix(header)
            if rest.lstrip().startswith(opening):
                return prompt + rest.lstrip()[len(opening) :].lstrip("\n")
            return prompt + message.thinking + closing + rest.lstrip("\n")
    raise BadRow("the template's generation prompt differs from the start of the turn", where)


def _content_after_thinking(message: Message) -> str:
    return message.content.rpartition(_END_THINK)[2].strip()
