"""A model folder's chat template, rendered by transformers as inference tools render it."""

import atexit
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from mlxtune.backend.text.template_child import INVALID, REFUSED, TEXT, UNSTEADY, Reply
from mlxtune.backend.text.template_process import Harmful, TemplateProcess
from mlxtune.config.limits import TEMPLATE, TOKENIZER_CONFIG
from mlxtune.core.data.model_template import PendingText, RenderCall
from mlxtune.core.data.problems import BadRow
from mlxtune.core.files.reading import read_text, read_value
from mlxtune.errors import ModelError, one_line

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
# The maximum number of characters of JSON to start at once: beyond it, round trips cost little.
_MAX_STARTED = 2**22
_ADDRESS = re.compile(r"<[^\n]{1,80}? at 0x[0-9a-f]{6,16}>")


class ChatTemplate:
    """Jinja templates and the special tokens that they may use; implements core's RenderChat.

    `sources` are templates by name: `default`, and optionally `tool_use` for conversations with
    tools.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._special_tokens = dict(special_tokens)
        self._started: list[_Rendering] = []

    def __call__(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render messages, with the options of core's RenderChat.

        Raises BadRow, with the template's reason, if the template rejects the messages. Raises
        ModelError if the template is invalid or harmful, or if its output is not deterministic.
        """
        rendering = _Rendering(*self._request(messages, **options))
        self._submit([rendering])
        return rendering.text()

    def start(self, calls: Iterable[RenderCall]) -> list[PendingText]:
        """Start calls in the child process, without waiting; return a function for each text.

        If the calls are long, only the first are started. Raises ModelError if the previous start
        found that a template is harmful or that its output is not deterministic.
        """
        texts: list[PendingText] = []
        started: list[_Rendering] = []
        size = 0
        for call in calls:
            try:
                rendering = _Rendering(*self._request(**call))
            except BadRow:  # the call raises the same error
                texts.append(partial(self, **call))
                continue
            size += len(rendering.request)
            if size > _MAX_STARTED:
                break
            started.append(rendering)
            texts.append(rendering.text)
        for rendering in self._started:
            rendering.reply()
        self._started = started
        for name in dict.fromkeys(each.name for each in started):
            self._submit([each for each in started if each.name == name])
        return texts

    def _submit(self, renderings: Sequence["_Rendering"]) -> None:
        """Start renderings with the same template."""
        source = self._sources[renderings[0].name]
        replies = _process().submit(source, [each.request for each in renderings])
        for index, rendering in enumerate(renderings):
            rendering.replies, rendering.index = replies, index

    def _request(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
    ) -> tuple[str, str]:
        """Return the name of the template to use, and the arguments for it as JSON.

        Raises BadRow if the messages or tools are nested too deeply.
        """
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._sources else _DEFAULT
        arguments: dict[str, Any] = {"conversations": [messages], "tools": tools}
        arguments |= {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        if enable_thinking is not None:
            arguments["enable_thinking"] = enable_thinking
        try:
            # transformers does the same to values that are not JSON.
            return name, json.dumps(arguments, default=lambda value: f"<{type(value).__name__}>")
        except RecursionError as error:
            raise BadRow("the model's template refuses it", one_line(error)) from error


@dataclass(eq=False)
class _Rendering:
    """A request to the template `name`, and its place among the replies once it has started."""

    name: str
    request: str
    replies: Future[list[Reply]] = field(init=False, repr=False)
    index: int = field(init=False)

    def text(self) -> str:
        """Wait for the text. Raises ModelError, or BadRow if the template rejects the messages."""
        kind, text = self.reply()
        if kind == INVALID:
            raise ModelError(
                f"the model's chat template cannot be read: {one_line(Exception(text))}: "
                "fix it, or name a built-in --template"
            )
        if kind == REFUSED:
            raise BadRow("the model's template refuses it", one_line(Exception(text)))
        return text

    def reply(self) -> Reply:
        """Wait for the reply. Raises ModelError if the template is harmful or not deterministic."""
        try:
            kind, text = self.replies.result()[self.index]
        except Harmful as error:
            raise ModelError(
                f"the model's chat template ({self.name}) {error}: fix it, or name a built-in "
                "--template"
            ) from error
        problem = text if kind == UNSTEADY else ""
        # Most Python objects print with their address in memory, which differs in each run.
        if kind == TEXT and " at 0x" in text and " at 0x" not in self.request:
            found = _ADDRESS.search(text)
            problem = f"writes a Python object ({one_line(found.group())})" if found else ""
        if problem:
            raise ModelError(
                f"the model's chat template ({self.name}) {problem}, so that training and "
                "inference would differ: fix it, or name a built-in --template"
            )
        return kind, text


def read_template_file(path: Path) -> str:
    """Return the text of a Jinja file. Raises ModelError if it cannot be read."""
    try:
        return read_text(path, TEMPLATE)
    except (OSError, ValueError) as error:
        raise ModelError(f"--template {path}: cannot be read: {one_line(error)}") from error


def start_process() -> None:
    """Start the rendering process in advance: starting takes as long as loading a tokenizer."""
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
            f"be read: {one_line(error)}: download the model again"
        ) from error
    if not all(isinstance(source, str) for source in sources.values()):
        raise ModelError(f"{folder}: its chat template is not text: download the model again")
    if sources and _DEFAULT not in sources:
        raise ModelError(
            f"{folder}: has chat templates, but none named {_DEFAULT}: name a built-in --template"
        )
    return sources
