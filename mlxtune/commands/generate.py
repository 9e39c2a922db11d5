"""`mlxtune generate`: answers one prompt or conversation, which may come from standard input."""

import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from mlxtune.backend.text.generate import Answer, Sampling
from mlxtune.config import GenerateConfig, as_path
from mlxtune.core.data.prompt import MAX_BYTES, check_size, parse_content, prompt_of, text_prompt
from mlxtune.core.files.reading import read_start
from mlxtune.errors import DataError
from mlxtune.session import trained_model
from mlxtune.session.arguments import Resolved, takes_resolved
from mlxtune.views.console import RunConsole
from mlxtune.views.output import print_answer, print_json, print_line

_STDIN = "standard input"


@takes_resolved(GenerateConfig)
def generate(
    options: Resolved[GenerateConfig],
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Answer a prompt or a conversation; `on_text` gets each piece of the answer as it arrives.

    Raises a subclass of MlxTuneError for errors in options, files or the model.
    """
    config = options.config
    with closing(RunConsole(quiet=config.quiet)) as console:
        session = trained_model.UseSession(config, console)
        reader = session.reader
        content, where = _content(config)
        completes = ""
        if config.messages is None and config.system is None:
            completes = _completes_text(session, named="template" in options.given)
        if completes:
            prompt = text_prompt(reader.encoder, content["messages"][0]["content"], where)
        else:
            reader.require_template()
            reader.warn_of_thinking(config.thinking, console)
            prompt = prompt_of(reader.encoder, content, where)
        loaded = session.load()
        trained_model.check_prompt_length(prompt, loaded.base, where)
        generator = trained_model.start_generator(session, loaded)
        how = completes or f"{reader.describe()} template"
        console.say("Prompt", f"{len(prompt.ids):,} tokens, {how}")

        def on_piece(text: str) -> None:
            console.result_arrived()
            on_text(text)

        return generator.answer(prompt, config.part(Sampling), on_piece)


def _completes_text(session: trained_model.UseSession[GenerateConfig], *, named: bool) -> str:
    """Return why the prompt is completed as plain text; empty if the prompt is answered.

    `named` says whether the options name a template.
    """
    if not session.reader.has_template:
        return "completed as plain text: the model has no chat template"
    trained = not named and trained_model.trained_on_text(session.adapter)
    return "completed as plain text, as the adapter was trained" if trained else ""


def show(config: GenerateConfig) -> None:
    """Print the answer as it arrives, or as JSON once it is complete."""
    if config.json:
        answer = generate(config)
        print_json(
            {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "prompt_tokens": answer.prompt_tokens,
                "tokens": len(answer.tokens),
                "prompt_seconds": answer.prompt_seconds,
                "tokens_per_second": answer.tokens_per_second,
            }
        )
        return
    try:
        answer = generate(config, print_answer)
    except KeyboardInterrupt:
        print_line()
        raise
    print_answer("\n")
    rate = f"{len(answer.tokens):,} tokens, {answer.tokens_per_second:.1f} tokens/s"
    cut = "; cut at --max-new-tokens" if answer.finish_reason == "length" else ""
    RunConsole(quiet=config.quiet).say("Done", rate + cut)


def _content(config: GenerateConfig) -> tuple[dict[str, Any], str]:
    """Return the conversation to answer, and its name for error messages. Raises DataError."""
    if config.messages is not None:
        where = _STDIN if config.messages == "-" else config.messages
        content = parse_content(_read(config.messages), where)
    else:
        where = "--prompt" if config.prompt is not None else _STDIN
        prompt = config.prompt if config.prompt is not None else _read_prompt()
        content = {"messages": [{"role": "user", "content": prompt}]}
    messages = content.get("messages")
    # Messages that are not a list are rejected later, when the prompt is encoded.
    if config.system is None or not isinstance(messages, list):
        return content, where
    first = messages[0] if messages else None
    if content.get("system") or (isinstance(first, dict) and first.get("role") == "system"):
        raise DataError(f"{where}: already has a system message: leave out --system")
    system = {"role": "system", "content": config.system}
    return {**content, "messages": [system, *messages]}, where


def _read_prompt() -> str:
    """Read the prompt from standard input. Raises DataError."""
    if sys.stdin is not None and sys.stdin.isatty():
        print_line("Type the prompt and end it with Ctrl-D:", stderr=True)
    try:
        content = _read("-")
        check_size(content, _STDIN)
        # Drop only the line end that `echo` writes, because other blank lines may belong to the
        # prompt.
        text = content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(f"{_STDIN}: is not text in UTF-8 (byte {error.start + 1})") from error
    if not text.strip():
        raise DataError(f"{_STDIN}: is empty: pipe a prompt in, or give --prompt")
    return text


def _read(name: str) -> bytes:
    """Read a file, or standard input for `-`, up to one byte over the limit. Raises DataError."""
    try:
        if name == "-":
            return b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_BYTES + 1)
        return read_start(as_path(name), MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not a file name"
        raise DataError(f"{name}: cannot be read: {why}: check --messages") from error
