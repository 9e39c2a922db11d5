"""A model folder's own chat template, rendered by transformers as inference tools render it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from mlxtune.backend.text.template_costs import Harmful
from mlxtune.backend.text.template_sandbox import render
from mlxtune.core.data.problems import BadRow
from mlxtune.errors import ModelError, one_line

_DEFAULT, _WITH_TOOLS = "default", "tool_use"


class ChatTemplate:
    """Jinja templates and the special tokens that they may use; see core's RenderChat.

    `sources` are templates by name: `default`, and optionally `tool_use` for conversations with
    tools.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._special_tokens = dict(special_tokens)

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
        options: dict[str, Any] = dict(self._special_tokens)
        options["add_generation_prompt"] = add_generation_prompt
        if enable_thinking is not None:
            options["enable_thinking"] = enable_thinking
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._sources else _DEFAULT
        try:
            return render(self._sources[name], messages, tools, options)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template cannot be read: line {error.lineno}: "
                f"{one_line(error)}: fix it, or name a built-in --template"
            ) from error
        except Harmful as error:
            raise ModelError(
                f"the model's chat template ({name}) {error}: fix it, or name a built-in --template"
            ) from error
        except Exception as error:  # a template is a program, which may fail in any way
            raise BadRow("the model's template refuses it", one_line(error)) from error


def read_chat_template(folder: Path) -> dict[str, str]:
    """Return a folder's templates by name, from its *.jinja files or else tokenizer_config.json.

    Raises ModelError if they cannot be read.
    """
    jinja, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        sources = {
            path.stem: path.read_text(encoding="utf-8")
            for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
        }
        if jinja.is_file():
            return sources | {_DEFAULT: jinja.read_text(encoding="utf-8")}
        read = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
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
