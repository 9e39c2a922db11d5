"""A model folder's own chat template, rendered by transformers as inference tools render it."""

import atexit
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlxtune.backend.text.template_process import (
    INVALID,
    REFUSED,
    TEXT,
    UNSTEADY,
    Asked,
    Harmful,
    Reply,
    TemplateProcess,
)
from mlxtune.config.limits import TEMPLATE, TOKENIZER_CONFIG
from mlxtune.core.data.model_template import RenderCall
from mlxtune.core.data.problems import BadRow
from mlxtune.core.files.sizes import read_text, read_value
from mlxtune.errors import ModelError, one_line

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
# Characters of JSON; above that, an exchange for each rendering costs little beside rendering it.
_MAX_PREFETCHED = 2**22
_ADDRESS = re.compile(r"<[^\n]{1,80}? at 0x[0-9a-f]{6,16}>")


class ChatTemplate:
    """Jinja templates and the special tokens that they may use; see core's RenderChat.

    `sources` are templates by name: `default`, and optionally `tool_use` for conversations with
    tools.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._special_tokens = dict(special_tokens)
        self._prefetched: dict[str, Reply] = {}
        self._expected: list[_Asked] = []

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
    ) -> str:
        """Render messages.

        Raises BadRow with the template's own reason if it rejects them, and ModelError if it is
        invalid or harmful.
        """
        name, request = self._request(messages, tools, add_generation_prompt, enable_thinking)
        awaited = any(request in each.requests for each in self._expected)
        if request not in self._prefetched and awaited:
            self._receive_expected()
        kind, text = self._prefetched.get(request) or self._receive(self._send(name, [request]))[0]
        if kind == INVALID:
            raise ModelError(
                f"the model's chat template cannot be read: {one_line(Exception(text))}: "
                "fix it, or name a built-in --template"
            )
        if kind == REFUSED:
            raise BadRow("the model's template refuses it", one_line(Exception(text)))
        return text

    def prefetch(self, calls: Iterable[RenderCall]) -> None:
        """Have the process render what later calls will ask for, and do not wait for it.

        It keeps this and what was prefetched the last time.

        Raises ModelError if the template is harmful.
        """
        requests: dict[str, list[str]] = {}
        size = 0
        for call in calls:
            try:
                name, request = self._request(**call)
            except BadRow:
                continue  # calling with it raises the same
            size += len(request)
            if size > _MAX_PREFETCHED:
                break
            requests.setdefault(name, []).append(request)
        self._receive_expected()
        self._expected = [self._send(name, several) for name, several in requests.items()]

    def _receive_expected(self) -> None:
        expected, self._expected = self._expected, []
        self._prefetched = {}
        for asked in expected:
            self._prefetched.update(zip(asked.requests, self._receive(asked), strict=True))

    def _request(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        enable_thinking: bool | None,
    ) -> tuple[str, str]:
        """Return the name of the template to use, and the arguments for it as JSON.

        Raises BadRow if they are nested too deeply.
        """
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._sources else _DEFAULT
        arguments: dict[str, Any] = {"conversations": [messages], "tools": tools}
        arguments |= self._special_tokens
        arguments["add_generation_prompt"] = add_generation_prompt
        if enable_thinking is not None:
            arguments["enable_thinking"] = enable_thinking
        try:
            # As transformers replaces what is not JSON.
            return name, json.dumps(arguments, default=lambda value: f"<{type(value).__name__}>")
        except RecursionError as error:
            raise BadRow("the model's template refuses it", one_line(error)) from error

    def _send(self, name: str, requests: Sequence[str]) -> "_Asked":
        return _Asked(name, _process().send(self._sources[name], requests))

    def _receive(self, asked: "_Asked") -> Sequence[Reply]:
        """Return the replies. Raises ModelError if the template is harmful."""
        try:
            replies = _process().receive(asked.renderings)
        except Harmful as error:
            raise ModelError(
                f"the model's chat template ({asked.name}) {error}: fix it, or name a built-in "
                "--template"
            ) from error
        if problem := _not_from(asked.requests, replies):
            raise ModelError(
                f"the model's chat template ({asked.name}) {problem}, so that training and "
                "inference would differ: fix it, or name a built-in --template"
            )
        return replies


@dataclass(frozen=True)
class _Asked:
    """Renderings by the template of a name."""

    name: str
    renderings: Asked

    @property
    def requests(self) -> Sequence[str]:
        return self.renderings.requests


def _not_from(requests: Sequence[str], replies: Sequence[Reply]) -> str:
    """Return what is wrong if a text holds what no messages can explain."""
    for request, (kind, text) in zip(requests, replies, strict=True):
        if kind == UNSTEADY:
            return text
        # Of Python's objects, most show where they are in memory.
        written = kind == TEXT and " at 0x" in text and " at 0x" not in request
        if written and (found := _ADDRESS.search(text)):
            return f"writes a Python object ({one_line(found.group())})"
    return ""


def start_process() -> None:
    """Start what will render templates, which takes as long as loading a tokenizer."""
    _process().start()


@cache
def _process() -> TemplateProcess:
    process = TemplateProcess()
    atexit.register(process.close)
    return process


def read_chat_template(folder: Path) -> dict[str, str]:
    """Return a folder's templates by name, from its *.jinja files or else tokenizer_config.json.

    Raises ModelError if they cannot be read.
    """
    jinja, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        sources = {
            path.stem: read_text(path, TEMPLATE)
            for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
        }
        if jinja.is_file():
            return sources | {_DEFAULT: read_text(jinja, TEMPLATE)}
        read = read_value(config, TOKENIZER_CONFIG) if config.is_file() else {}
        template = read.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        sources |= {_DEFAULT: template} if isinstance(template, str) else dict(template or {})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{folder}: its chat template, in chat_template.jinja or tokenizer_config.json, cannot "
            f"be read: {one_line(error)}: download it again"
        ) from error
    if not all(isinstance(source, str) for source in sources.values()):
        raise ModelError(f"{folder}: has a chat template that is not text: download it again")
    if sources and _DEFAULT not in sources:
        raise ModelError(
            f"{folder}: has chat templates, but none named {_DEFAULT}: name a built-in --template"
        )
    return sources
