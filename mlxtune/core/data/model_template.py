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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from mlxtune.core.data.conversation import (
    Conversation,
    Message,
    function_name,
    to_json,
)
from mlxtune.core.data.problems import (
    DROPPED_CONTENT,
    DROPPED_SYSTEM,
    DROPPED_TEXT,
    DROPPED_THINKING,
    DROPPED_TOOLS,
    MERGED_SYSTEM,
    NO_END_OF_TURN,
    NO_PROMPT,
    BadRowError,
)
from mlxtune.core.data.sources.keys import THINKING_FIELDS, reads_key, reads_variable
from mlxtune.core.data.sources.messages import supervised_turns
from mlxtune.core.data.sources.tool_calls import with_objects
from mlxtune.core.data.template import (
    END_OF_TURN,
    PendingRendering,
    RenderedText,
    Rendering,
    without_own_tags,
)

_END_THINK = "</think>"
_TAG = re.compile("(</?think>)")
# A template that takes arguments as JSON text too.
_TEXT_ARGUMENTS = re.compile(r"\.arguments is string\b")
# The tags that open thinking in a generation prompt, and close it before the answer.
_THINKING = (("<think>", "\n</think>\n\n"), ("<|channel>thought", "\n<channel|>"))
_TEST_CONTENT = "mlxtune asks whether this is shown"
# Each turn is rendered with all messages before it, so many short turns would take minutes. The
# maximum number of characters to render in all, and the number to add for each message.
_MAX_RENDERED_CHARS, _CHARS_PER_MESSAGE = 2**27, 64


class TextRequest(Protocol):
    """A request to render messages, and its reply."""

    def text(self) -> str:
        """Start the request unless it has started, and wait for the text.

        Raises BadRowError with the template's own reason if the template refuses the messages.
        """


Request = TypeVar("Request", bound=TextRequest)


class ChatRenderer(Protocol[Request]):
    """The template itself, as transformers renders it."""

    def request(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Request:
        """Return a request to render messages. Raises BadRowError if they are nested too deeply."""

    def start(self, requests: Iterable[Request]) -> None:
        """Start requests without waiting: as many of the first as the renderer chooses."""


@dataclass(frozen=True)
class _Chat:
    """A conversation in rendering.

    `first` is the index of the first message that the template gets: 1 if a system message is
    merged into the first user turn. `requests` are the requests for the prompt and the text of each
    turn, by the index of the turn; a turn that was rendered has none.
    """

    conversation: Conversation
    first: int
    notes: dict[str, str]
    requests: dict[int, tuple[TextRequest, TextRequest]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelTemplate:
    """Renders conversations with a model's own template.

    `end_tokens` are the control tokens that may end a turn. `template_text` shows how the
    template supports thinking. `turns`, `thinking` and `merge_system` are options.
    """

    renderer: ChatRenderer[Any]
    end_tokens: tuple[str, ...]
    template_text: str = ""
    turns: str = "all"
    thinking: str = "auto"
    merge_system: bool = False

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        longest_first = sorted(filter(None, self.end_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _shows_system(self) -> bool:
        messages = [{"role": "system", "content": _TEST_CONTENT}, {"role": "user", "content": "Hi"}]
        try:
            request = self.renderer.request(messages, add_generation_prompt=True)
            return _TEST_CONTENT in request.text()
        except BadRowError:
            return False

    @cached_property
    def _thinking_field(self) -> str | None:
        read = (name for name in THINKING_FIELDS if reads_key(self.template_text, name))
        return next(read, None)

    @cached_property
    def _header(self) -> str:
        """The text that the generation prompt adds; Gemma 4 leaves it out after a tool's result."""
        question = [{"role": "user", "content": _TEST_CONTENT}]
        try:
            before, prompt = (
                self.renderer.request(question, add_generation_prompt=asks).text()
                for asks in (False, True)
            )
        except BadRowError:
            return ""
        return prompt[len(before) :] if prompt.startswith(before) else ""

    def __call__(self, conversation: Conversation) -> Rendering:
        """Return one text with every supervised turn, or one text for each turn.

        Raises BadRowError if the template refuses the conversation or an answer cannot be located.
        """
        return self._rendering(self._prepare(conversation))

    def start(self, conversations: Iterable[Conversation]) -> list[PendingRendering]:
        """Start to render conversations; return a function for each that waits for its rendering.

        The functions raise the errors of rendering.
        """
        chats: list[_Chat] = []
        pending: list[PendingRendering] = []
        for conversation in conversations:
            try:
                chats.append(self._prepare(conversation))
            except BadRowError:  # rendering the conversation raises the same error
                pending.append(partial(self, conversation))
            else:
                pending.append(partial(self._rendering, chats[-1]))
        self.renderer.start(self._requests(chats))
        return pending

    def _requests(self, chats: Iterable[_Chat]) -> Iterator[TextRequest]:
        """Yield the requests for each supervised turn's prompt and text."""
        for chat in chats:
            with suppress(BadRowError):  # rendering the conversation raises the same error
                for index in supervised_turns(chat.conversation, self.turns):
                    if index > chat.first:
                        chat.requests[index] = self._requests_of_turn(chat, index)
                        yield from chat.requests[index]

    def _rendering(self, chat: _Chat) -> Rendering:
        conversation = chat.conversation
        try:
            turns = list(self._turns(chat))
        except BadRowError as problem:
            is_system = conversation.messages[0].role == "system"
            if not is_system or self.merge_system or self._shows_system:
                raise
            raise BadRowError(problem.kind, f"{problem.detail}: try --merge-system") from problem
        whole = turns[-1].text
        spans = tuple(span for turn in turns for span in turn.spans)
        shown = [turn.text[: turn.spans[0][1]] for turn in turns]
        if all(map(whole.startswith, shown)):
            texts: tuple[RenderedText, ...] = (RenderedText(whole, spans, add_bos=False),)
        else:
            texts = tuple(
                RenderedText(text, (span,), add_bos=False)
                for text, span in zip(shown, spans, strict=True)
            )
        return Rendering(conversation.row, texts, chat.notes)

    def _prepare(self, conversation: Conversation) -> _Chat:
        """Remove the template's own tags; decide about a system message that it leaves out."""
        if any(message.role == "tool" for message in conversation.messages):
            conversation = without_own_tags(conversation, self.template_text)
        messages = conversation.messages
        if messages[0].role != "system" or self._shows_system:
            return _Chat(conversation, 0, {})
        is_blank = not messages[0].content.strip()
        if not self.merge_system:
            return _Chat(conversation, 0, {} if is_blank else {DROPPED_SYSTEM: ""})
        if not is_blank and all(message.role != "user" for message in messages):
            raise BadRowError("a system message with no user turn to merge it into")
        return _Chat(conversation, 1, {} if is_blank else {MERGED_SYSTEM: ""})

    def _layout(self, chat: _Chat, end: int) -> list[Mapping[str, Any]]:
        """Return the messages before an index as the template expects them."""
        system, messages = chat.conversation.messages[0], chat.conversation.messages
        layout = list(map(self._fields_of, messages[chat.first : end]))
        users = (i for i, fields in enumerate(layout) if fields["role"] == "user")
        if chat.first and system.content.strip() and (user := next(users, None)) is not None:
            content = f"{system.content}\n\n{layout[user]['content']}"
            layout[user] = _changed(layout[user], content=content)
        return layout

    def _fields_of(self, message: Message) -> Mapping[str, Any]:
        """Return a message's fields; its thinking is only in the field that the template reads."""
        if message.tool_calls and not _TEXT_ARGUMENTS.search(self.template_text):
            calls = with_objects(message.tool_calls, "arguments of a call")
            message = replace(message, fields={**message.fields, "tool_calls": calls})
        name, content = self._thinking_field, message.content
        if name is None or not message.thinking:
            return message.fields
        present = [field for field in THINKING_FIELDS if message.fields.get(field)]
        tagged = _END_THINK in content
        if (
            (present == [name] and not tagged)
            or (tagged and not present and _END_THINK in self.template_text)
            # The two thoughts differ, so keep both.
            or (tagged and message.thinking not in content)
        ):
            return message.fields
        fields: dict[str, Any] = dict.fromkeys(present) | {name: message.thinking}
        return _changed(message.fields, content=_without_tags(content), **fields)

    def _turns(self, chat: _Chat) -> Iterator[RenderedText]:
        """Yield each supervised turn: its prompt, its answer, and the text after the answer."""
        conversation, notes = chat.conversation, chat.notes
        messages = conversation.messages
        selected = supervised_turns(conversation, self.turns)
        _check_cost(messages, selected)
        for index in selected:
            message, where = messages[index], f"message {index + 1}"
            try:
                turn = self._turn(chat, index, where)
            except BadRowError:
                has_prompt = any(each.role in ("user", "tool") for each in messages[:index])
                if has_prompt or index == selected[-1]:
                    raise
                notes[NO_PROMPT] = ""
                continue
            content, answer = _content_after_thinking(message), turn.text[slice(*turn.spans[0])]
            # The content comes last and may quote the thinking, so look for thinking outside it.
            parts = answer.rpartition(content) if content else (answer, "", "")
            outside, inside = _by_thinking(message.content)
            if any(text not in answer for text in outside):
                notes[DROPPED_CONTENT if message.tool_calls else DROPPED_TEXT] = where
            if any(text not in answer for text in inside) or (
                message.thinking and not any(message.thinking in part for part in parts[::2])
            ):
                notes[DROPPED_THINKING] = where
            yield turn
        if dropped := _dropped(messages[chat.first : selected[-1]], turn.text):
            notes.setdefault(DROPPED_TEXT, f"message {chat.first + dropped}")
        tool = function_name(conversation.tools[0]) if conversation.tools else None
        if tool is not None and tool not in turn.prompt:
            notes[DROPPED_TOOLS] = ""

    def _turn(self, chat: _Chat, index: int, where: str) -> RenderedText:
        if index == chat.first:
            # Inference never generates a turn without a message before it.
            raise BadRowError("the conversation is an assistant turn without a prompt before it")
        requests = chat.requests.pop(index, None) or self._requests_of_turn(chat, index)
        message, header = chat.conversation.messages[index], self._header
        prompt, text = (request.text() for request in requests)
        if not text.startswith(prompt):
            try:
                text = _continue_thinking(prompt, text, message, header, where)
            except BadRowError as problem:
                before = chat.conversation.messages[index - 1]
                raise _answer_after(before, where) or problem from problem
        rest = text[len(prompt) :]
        if not prompt.endswith(header):
            rest = _without_header(rest, header, message)
        end, end_note = self._end(rest, message)
        answer = rest[:end]
        # The thinking and the content may also name the tool, so both are left out.
        shown = self._ends.sub("", answer)
        for part in (message.thinking, _content_after_thinking(message)):
            shown = shown.replace(part, "", 1)
        for call in message.tool_calls:
            name = function_name(call)
            if name is None:
                raise BadRowError("a tool call has no function name", where)
            if name not in shown:
                remedy = "name a template that writes tool calls"
                if END_OF_TURN["qwen3"] in self.end_tokens:
                    remedy += ", such as --template qwen3"
                raise BadRowError(
                    "the model's template leaves out a tool call", f"{where}: {remedy}"
                )
        if end_note:
            chat.notes[NO_END_OF_TURN] = end_note
        span = len(prompt), len(prompt) + end
        return RenderedText(prompt + rest, (span,), add_bos=False)

    def _end(self, rest: str, message: Message) -> tuple[int, str]:
        """Return where the answer at the start of `rest` ends, after its end-of-turn token.

        If no token ends the answer, it ends after the text that follows its content; this text is
        returned too, with a remedy.
        """
        ends = [match.span() for match in self._ends.finditer(rest)]
        # The thinking comes first, then the content, then the tool calls. The end is the first
        # control token after the content or, with tool calls, the last control token of the
        # rendering.
        content = _content_after_thinking(message)
        if content and not message.tool_calls:
            end = _end_after(content, rest, ends)
        else:
            end = ends[-1][1] if ends else 0
        if end:
            return end, ""
        head, middle, tail = rest.rstrip().rpartition(content or _TEST_CONTENT)
        end_tokens = list(filter(None, self.end_tokens))[:4]
        remedy = f": let the template end each answer with {end_tokens[0]}" if end_tokens else ""
        if middle and tail and not message.tool_calls:
            return len(head + middle + tail), f"{tail.lstrip()}{remedy}"
        raise BadRowError(
            "no end-of-turn token", f"looked for {', '.join(end_tokens) or 'none'}{remedy}"
        )

    def _requests_of_turn(self, chat: _Chat, index: int) -> tuple[TextRequest, TextRequest]:
        """Return the requests for the prompt and the text of a turn."""
        conversation = chat.conversation
        thinks, message = self._thinks(conversation), conversation.messages[index]
        *before, turn = self._layout(chat, index + 1)
        if thinks is False and message.thinking:
            present = dict.fromkeys(name for name in THINKING_FIELDS if name in turn)
            turn = _changed(turn, content=_without_tags(turn["content"]), **present)
        request = partial(
            self.renderer.request, tools=conversation.tools or None, enable_thinking=thinks
        )
        if options := {
            name: value
            for name, value in conversation.options.items()
            if name != "enable_thinking" and reads_variable(self.template_text, name)
        }:
            request = partial(request, options=options)
        return request(before, add_generation_prompt=True), request([*before, turn])

    def _thinks(self, conversation: Conversation) -> bool | None:
        """Return `enable_thinking` for the template; None if the template does not read it."""
        if "enable_thinking" not in self.template_text:
            return None
        if self.thinking != "auto":
            return self.thinking == "on"
        if isinstance(enabled := conversation.options.get("enable_thinking"), bool):
            return enabled
        return any(message.thinking for message in conversation.messages)


def _end_after(content: str, rest: str, ends: Sequence[tuple[int, int]]) -> int:
    """Return the end of the first control token after the content in `rest`, or 0.

    `ends` are the spans of control tokens. If the content only occurs as a part of control tokens,
    the last control token is the end.
    """
    stop, occurs_apart = len(rest) + 1, False
    while (at := rest.rfind(content, 0, stop - 1)) >= 0:
        stop = at + len(content)
        # An answer such as "end" or "<" may also occur inside a control token, or reach into one.
        if any(
            start < at < end or start < stop < end or (start, end) == (at, stop)
            for start, end in ends
        ):
            continue
        if after := next((end for start, end in ends if start >= stop), 0):
            return after
        # An end token within the content does not end the turn.
        occurs_apart = True
    return 0 if occurs_apart or not ends else ends[-1][1]


def _check_cost(messages: Sequence[Message], turns: Sequence[int]) -> None:
    """Raise BadRowError for a conversation whose turns take too long to render one by one."""
    ends = [0, *accumulate(map(_size, messages))]
    cost = sum(ends[turn] + ends[turn + 1] for turn in turns)
    if cost > _MAX_RENDERED_CHARS:
        raise BadRowError(
            "it has too many turns to render",
            f"{len(messages):,} messages, {cost:,} characters in all: split the conversation",
        )


def _size(message: Message) -> int:
    try:
        return len(str(message.fields)) + _CHARS_PER_MESSAGE
    except RecursionError as error:
        raise BadRowError("JSON nested too deeply") from error


def _changed(fields: Mapping[str, Any], **changes: Any) -> Mapping[str, Any]:
    """Return a message's fields with changes; None removes a field."""
    return {k: value for k, value in {**fields, **changes}.items() if value is not None}


def _without_tags(content: str) -> str:
    _, tag, answer = content.partition(_END_THINK)
    return answer.lstrip("\n") if tag else content


def _dropped(messages: Iterable[Message], rendered: str) -> int:
    """Return the 1-based number of the first message whose text is not rendered; 0 if all are.

    Other notes name calls and system messages. Some templates write results as JSON.
    """
    end = 0
    for number, message in enumerate(messages, start=1):
        if message.role == "system" or message.tool_calls:
            continue
        for text in _by_thinking(message.content)[0]:
            # Messages stand in order, so that a long conversation is searched once.
            if (start := rendered.find(text, end)) >= 0:
                end = start + len(text)
            elif text not in rendered and to_json(text)[1:-1] not in rendered:
                return number
    return 0


def _without_header(rest: str, header: str, message: Message) -> str:
    """Return a turn without the header that its prompt lacks; the answer's own text stays."""
    own = message.content.startswith(header) and not rest.startswith(2 * header)
    return rest if own else rest.removeprefix(header)


def _continue_thinking(prompt: str, text: str, message: Message, header: str, where: str) -> str:
    """Return the turn's text as the continuation of a prompt that has opened the thinking.

    Some templates (DeepSeek-R1's) write the opening tag in the generation prompt but not in turns.

    Raises BadRowError if the prompt differs from the turn in any other way.
    """
    for opening, closing in _THINKING:
        head, opened, after = prompt.rpartition(opening)
        if opened and not after.strip() and text.startswith(head):
            rest = _without_header(text[len(head) :], header, message)
            if rest.lstrip().startswith(opening):
                return prompt + rest.lstrip()[len(opening) :].lstrip("\n")
            return prompt + message.thinking + closing + rest.lstrip("\n")
    raise BadRowError("the template's generation prompt differs from the start of the turn", where)


def _answer_after(before: Message, where: str) -> BadRowError | None:
    """Return the reason why no template asks for an answer after an assistant's message."""
    if before.role != "assistant":
        return None
    if before.tool_calls:
        return BadRowError(
            "a tool call without a result", f"{where} follows it: add the tool's message"
        )
    return BadRowError("two assistant turns in a row", f"{where}: join it to the turn before")


def _by_thinking(content: str) -> tuple[list[str], list[str]]:
    """Return the texts outside of thinking, and the texts of thinking, whose tags may repeat."""
    outside: list[str] = []
    inside: list[str] = []
    *pieces, last = _TAG.split(content)
    before = ""
    for text, tag in zip(pieces[::2], pieces[1::2], strict=True):
        is_thinking = tag == _END_THINK and before != _END_THINK
        (inside if is_thinking else outside).append(text.strip())
        before = tag
    outside.append(last.strip())
    return [*filter(None, outside)], [*filter(None, inside)]


def _content_after_thinking(message: Message) -> str:
    return message.content.rpartition(_END_THINK)[2].strip()
