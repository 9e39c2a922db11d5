"""A model folder's chat template, rendered as inference tools render it, with transformers.

A chat template is an untrusted program. transformers' sandbox keeps it from accessing files and
other code, but not from running forever or filling the memory, so it runs in a limited process.

Parent and helper exchange lines of JSON. The parent sends one header, then a line for each request;
the helper answers with one line of all replies.
"""

import atexit
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mlxtune.backend.text import template_helper
from mlxtune.backend.text.template_helper import INVALID, REFUSED, TEXT, UNSTEADY, Reply
from mlxtune.config.limits import TEMPLATE_LIMITS, TOKENIZER_CONFIG_LIMITS
from mlxtune.core.data.problems import BadRowError
from mlxtune.core.files.processes import LimitedProcess, ProcessEndedError
from mlxtune.core.files.reading import read_text, read_value
from mlxtune.errors import ModelError, one_line

_DEFAULT_TEMPLATE, _TOOL_TEMPLATE = "default", "tool_use"
# The maximum number of characters of JSON to start at once: beyond it, round trips cost little.
_MAX_PENDING_CHARS = 2**22
_ADDRESS = re.compile(r"<[^\n]{1,80}? at 0x[0-9a-f]{6,16}>")
# Longer conversations get more time and longer results: the time grows by `seconds` for every
# `_TIMEOUT_CHARS` characters, and a result may have `_MAX_GROWTH` characters for each character of
# its request.
_TIMEOUT_CHARS, _MAX_GROWTH = 2**22, 16
# How many characters a result may have for any request, and how many all results of an exchange may
# have together.
_BASE_CHARS, _MAX_RESULT = 2**20, 2**25

_SIZE_PROBLEM = "produces more text or values than any conversation needs"


class ChatTemplate:
    """Jinja templates and the special tokens that they may use; implements core's ChatRenderer.

    `sources` are templates by name: `default`, and optionally `tool_use` for conversations with
    tools.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._special_tokens = dict(special_tokens)
        self._started: list[TemplateRequest] = []

    def request(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> "TemplateRequest":
        """Return a request to render messages; `options` are further variables of the template.

        Raises BadRowError if the messages or tools are nested too deeply.
        """
        name = _TOOL_TEMPLATE if tools and _TOOL_TEMPLATE in self._sources else _DEFAULT_TEMPLATE
        arguments: dict[str, Any] = {**(options or {}), "conversations": [messages]}
        arguments |= {
            "tools": tools,
            **self._special_tokens,
            "add_generation_prompt": add_generation_prompt,
        }
        if enable_thinking is not None:
            arguments["enable_thinking"] = enable_thinking
        try:
            # transformers does the same to values that are not JSON.
            text = json.dumps(arguments, default=lambda value: f"<{type(value).__name__}>")
        except RecursionError as error:
            raise BadRowError("the model's template refuses it", one_line(error)) from error
        return TemplateRequest(name, self._sources[name], text)

    def start(self, requests: Iterable["TemplateRequest"]) -> None:
        """Start requests in the helper process, without waiting; if they are long, only the first.

        Raises ModelError if the previous start found that a template is harmful or that its output
        is not deterministic.
        """
        started: list[TemplateRequest] = []
        size = 0
        for request in requests:
            size += len(request.arguments)
            if size > _MAX_PENDING_CHARS:
                break
            started.append(request)
        for earlier in self._started:
            earlier.reply()
        self._started = started
        for name in dict.fromkeys(each.name for each in started):
            start_together([each for each in started if each.name == name])


@dataclass(eq=False)
class TemplateRequest:
    """A request to render messages with the template `name`, and its reply.

    `arguments` is a line of JSON with the arguments of transformers' render_jinja_template.
    """

    name: str
    source: str
    arguments: str
    # All replies of the exchange that this request is part of, and this request's place in them.
    _replies: Future[list[Reply]] | None = field(default=None, repr=False)
    _index: int = 0

    def text(self) -> str:
        """Start the request unless it has started, and wait for the text.

        Raises BadRowError, with the template's reason, if the template rejects the messages. Raises
        ModelError if the template is invalid or harmful, or if its output is not deterministic.
        """
        kind, text = self.reply()
        if kind == INVALID:
            raise ModelError(
                f"the model's chat template cannot be read: {one_line(Exception(text))}: "
                "fix it, or name a built-in --template"
            )
        if kind == REFUSED:
            raise BadRowError("the model's template refuses it", one_line(Exception(text)))
        return text

    def reply(self) -> Reply:
        """Wait for the reply. Raises ModelError if the template is harmful or not deterministic."""
        if self._replies is None:
            start_together([self])
        assert self._replies is not None
        try:
            kind, text = self._replies.result()[self._index]
        except HarmfulTemplateError as error:
            raise ModelError(
                f"the model's chat template ({self.name}) {error}: fix it, or name a built-in "
                "--template"
            ) from error
        problem = text if kind == UNSTEADY else ""
        # Most Python objects print with their address in memory, which differs in each run.
        if kind == TEXT and " at 0x" in text and " at 0x" not in self.arguments:
            match = _ADDRESS.search(text)
            problem = f"writes a Python object ({one_line(match.group())})" if match else ""
        if problem:
            raise ModelError(
                f"the model's chat template ({self.name}) {problem}, so that training and "
                "inference would differ: fix it, or name a built-in --template"
            )
        return kind, text


def start_together(requests: Sequence[TemplateRequest]) -> None:
    """Start requests with the same template in one exchange with the helper process."""
    replies = _process().submit(requests[0].source, [each.arguments for each in requests])
    for index, request in enumerate(requests):
        request._replies, request._index = replies, index


def start_process() -> None:
    """Start the rendering process in advance: starting takes as long as loading a tokenizer."""
    _process().start()


@cache
def _process() -> "TemplateProcess":
    process = TemplateProcess()
    atexit.register(process.close)
    return process


class HarmfulTemplateError(Exception):
    """A template exceeds the limits or ends its process; the message says how."""


class TemplateProcess:
    """The helper process, which is started on first use, and again after it has ended.

    A rendering may take `seconds` of CPU time, or more for a long request. The helper may use
    `memory` bytes.
    """

    def __init__(self, seconds: float = 10.0, memory: int = 2**30) -> None:
        self._seconds, self._memory = seconds, memory
        self._helper: LimitedProcess | None = None
        self._source: str | None = None
        self._lock = threading.Lock()

    def submit(self, source: str, requests: Sequence[str]) -> Future[list[Reply]]:
        """Start `render` in the background; return a future of its result or exception."""
        future: Future[list[Reply]] = Future()

        def work() -> None:
            try:
                future.set_result(self.render(source, requests))
            except BaseException as error:  # noqa: BLE001  the future raises it
                future.set_exception(error)

        # Python's exit does not wait for a daemon thread.
        threading.Thread(target=work, daemon=True).start()
        return future

    def render(self, source: str, requests: Sequence[str]) -> list[Reply]:
        """Render a template for each request, which is JSON with render_jinja_template's arguments.

        Raises HarmfulTemplateError if the template exceeds the limits or ends its process.
        """
        with self._lock:
            try:
                return self._exchange(source, requests)
            except BaseException:  # also Ctrl-C, after which no caller reads the reply
                self.close()
                raise

    def _exchange(self, source: str, requests: Sequence[str]) -> list[Reply]:
        helper = self._helper = self._helper or self._new()
        seconds = self._seconds * (1 + max(map(len, requests)) / _TIMEOUT_CHARS)
        # The helper keeps the last source.
        changed = json.dumps(None if source == self._source else source)
        self._source = source
        header = f"[{seconds}, {len(requests)}, {changed}]"
        lines = "\n".join([header, *requests, ""]).encode()
        helper.write(lines)
        try:
            reply = helper.read_line(_MAX_RESULT + _MAX_GROWTH * len(lines))
        except ProcessEndedError as error:
            raise HarmfulTemplateError(_why(error.reason, seconds)) from None
        replies = [_whole(str(kind), str(text)) for kind, text in json.loads(reply)]
        for request, (_, text) in zip(requests, replies, strict=True):
            if len(text) > _BASE_CHARS + _MAX_GROWTH * len(request):
                raise HarmfulTemplateError(_SIZE_PROBLEM)
        return replies

    def close(self) -> None:
        """End the helper."""
        if self._helper is not None:
            self._helper.close()
        self._helper = self._source = None

    def start(self) -> None:
        """Start the helper if there is none, without waiting for it."""
        with self._lock:
            self._helper = self._helper or self._new()

    def _new(self) -> LimitedProcess:
        return LimitedProcess(Path(template_helper.__file__), self._memory)


def _whole(kind: str, text: str) -> Reply:
    """Return a reply; text that UTF-8, and so a tokenizer, cannot encode becomes a refusal."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"it writes half of a surrogate pair, U+{ord(text[error.start]):04X}"
        return (REFUSED if kind == TEXT else kind), half
    return kind, text


def _why(ended: str, seconds: float) -> str:
    if ended == "time":
        return f"takes more than {seconds:.3g} s for a conversation"
    if ended in ("memory", "length"):
        return _SIZE_PROBLEM
    return f"ends the process that renders it ({ended})"


def read_template_file(path: Path) -> str:
    """Return the text of a Jinja file. Raises ModelError if it cannot be read."""
    try:
        return read_text(path, TEMPLATE_LIMITS)
    except (OSError, ValueError) as error:
        raise ModelError(f"--template {path} cannot be read: {one_line(error)}") from error


def read_chat_template(folder: Path) -> dict[str, str]:
    """Return a folder's templates by name, from its *.jinja files or else its *.json files.

    Raises ModelError if they cannot be read.
    """
    jinja, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        sources = {
            path.stem: read_text(path, TEMPLATE_LIMITS)
            for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
        }
        if jinja.is_file():
            return sources | {_DEFAULT_TEMPLATE: read_text(jinja, TEMPLATE_LIMITS)}
        # Processors of models with images keep their template in chat_template.json.
        processor = folder / "chat_template.json"
        template = None
        for path in filter(Path.is_file, (config, processor)):
            template = template or read_value(path, TOKENIZER_CONFIG_LIMITS).get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        sources |= (
            {_DEFAULT_TEMPLATE: template} if isinstance(template, str) else dict(template or {})
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{folder}: its chat template, in chat_template.jinja, tokenizer_config.json or "
            f"chat_template.json, cannot be read: {one_line(error)}: download the model again"
        ) from error
    if not all(isinstance(source, str) for source in sources.values()):
        raise ModelError(f"{folder}: its chat template is not text: download the model again")
    if sources and _DEFAULT_TEMPLATE not in sources:
        raise ModelError(
            f"{folder} has chat templates, but none named {_DEFAULT_TEMPLATE}: name a built-in "
            "--template"
        )
    return sources
