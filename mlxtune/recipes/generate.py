"""The recipe of `mlxtune generate`: one answer, to a prompt, a conversation or standard input.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from mlxtune.config import GenerateConfig, as_path
from mlxtune.errors import DataError
from mlxtune.setup.model import (
    asking_reader,
    check_fits,
    find_model,
    load_model,
    print_text,
    start_generator,
)

if TYPE_CHECKING:
    from mlxtune.backend.text.generate import Answer

_STDIN = "standard input"
_MAX_BYTES = 64 * 2**20


def generate(config: GenerateConfig, on_text: Callable[[str], None] = lambda text: None) -> Answer:
    """Answer a prompt or a conversation; `on_text` hears of the answer as it comes.

    Raises a child of MlxTuneError for what options, files or the model cause.
    """
    from mlxtune.core.data.prompt import prompt_of
    from mlxtune.terminal.console import RunConsole

    folder = find_model(config)
    content, where = _asked(config)
    with closing(RunConsole(quiet=config.quiet)) as console:
        reader = asking_reader(config, folder)
        prompt = prompt_of(reader.encoder, content, where)
        used = load_model(config, folder, console)
        check_fits(prompt, used, where)
        generator, sampling = start_generator(config, used, reader)
        console.say("Prompt", f"{len(prompt.ids):,} tokens, {reader.describe()} template")
        return generator.answer(prompt, sampling, on_text)


def show(config: GenerateConfig) -> None:
    """Print the answer as it comes, or JSON at its end."""
    from mlxtune.terminal.console import RunConsole

    if config.json:
        json.dump(as_dict(generate(config)), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    try:
        found = generate(config, print_text)
    except KeyboardInterrupt:
        print()
        raise
    print()
    rate = f"{len(found.tokens):,} tokens, {found.tokens_per_second:.1f} a second"
    cut = "; cut at --max-new-tokens" if found.finish_reason == "length" else ""
    RunConsole(quiet=config.quiet).say("Done", rate + cut)


def as_dict(found: Answer) -> dict[str, Any]:
    """Return an answer as JSON-ready values."""
    return {
        "text": found.text,
        "finish_reason": found.finish_reason,
        "prompt_tokens": found.prompt_tokens,
        "tokens": len(found.tokens),
        "prompt_seconds": found.prompt_seconds,
        "tokens_per_second": found.tokens_per_second,
    }


def _asked(config: GenerateConfig) -> tuple[dict[str, Any], str]:
    """Return the conversation to answer, and what it is named in an error. Raises DataError."""
    from mlxtune.core.data.prompt import parse_content

    if config.messages is not None:
        where = _STDIN if config.messages == "-" else config.messages
        content = parse_content(_read(config.messages), where)
    else:
        where = "--prompt" if config.prompt is not None else _STDIN
        said = config.prompt if config.prompt is not None else _said()
        content = {"messages": [{"role": "user", "content": said}]}
    messages = content.get("messages")
    # What is no list is refused with a reason when the prompt is made of it.
    if config.system is None or not isinstance(messages, list):
        return content, where
    first = messages[0] if messages else None
    if content.get("system") or (isinstance(first, dict) and first.get("role") == "system"):
        raise DataError(f"{where}: has a system message already: leave out --system")
    system = {"role": "system", "content": config.system}
    return {**content, "messages": [system, *messages]}, where


def _said() -> str:
    """Return what standard input says. Raises DataError."""
    if sys.stdin is not None and sys.stdin.isatty():
        print("The prompt, ended with Ctrl-D:", file=sys.stderr)
    try:
        said = _read("-").decode("utf-8-sig").strip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{_STDIN}: is not text in UTF-8 (byte {error.start + 1})") from error
    if not said.strip():
        raise DataError(f"{_STDIN}: says nothing: give a prompt, or name one with --prompt")
    return said


def _read(name: str) -> bytes:
    try:
        if name == "-":
            content = b"" if sys.stdin is None else sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            # A pipe that nobody writes to is empty, and not waited for.
            with os.fdopen(os.open(as_path(name), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                os.set_blocking(file.fileno(), True)
                content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no name of a file"
        raise DataError(f"{name}: cannot be read: {why}: check --messages") from error
    if len(content) > _MAX_BYTES:
        where = _STDIN if name == "-" else name
        raise DataError(f"{where}: is larger than {_MAX_BYTES >> 20} MiB: give one conversation")
    return content
