"""`mlxtune generate`: answers a prompt, a conversation, or every row of a file."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxtune.backend.text.generate import Answer, Generator, Sampling, seed
from mlxtune.config import GenerateConfig, as_path
from mlxtune.config.limits import RECORD_LIMITS, parse_json
from mlxtune.core.data.problems import BadRowError, where
from mlxtune.core.data.prompt import (
    MAX_BYTES,
    Prompt,
    check_size,
    parse_content,
    prompt_of,
    text_prompt,
)
from mlxtune.core.data.sources.datafiles import find_data_files
from mlxtune.core.data.sources.keys import normalized_key
from mlxtune.core.data.sources.messages import role_of
from mlxtune.core.data.sources.rows import read_objects
from mlxtune.core.files.reading import file_hash, open_regular, read_start
from mlxtune.core.files.writing import (
    append_line,
    as_output_error,
    check_outputs,
    make_folder,
    write_file,
)
from mlxtune.core.formatting import pluralize
from mlxtune.errors import ConfigError, DataError, OutputError, shorten
from mlxtune.session import trained_model
from mlxtune.session.arguments import ResolvedOptions, takes_resolved
from mlxtune.views.console import RunConsole
from mlxtune.views.output import print_answer, print_json, print_line

_STDIN = "standard input"
# Keys of a prompt in rows of --data, in lower case and without punctuation.
_PROMPTS = ("prompt", "question", "query", "instruction", "input", "message", "text")
# Options that change no answer.
_NEUTRAL_OPTIONS = {"model_path", "adapter", "data", "output", "overwrite", "quiet", "memory_limit"}


@takes_resolved(GenerateConfig)
def generate(
    options: ResolvedOptions[GenerateConfig],
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Answer a prompt or a conversation; `on_text` gets each piece of the answer as it arrives.

    `answer_rows` answers the rows of a file. Raises a subclass of MlxTuneError for errors in
    options, files or the model.
    """
    config = options.config
    if config.data is not None:
        raise ConfigError(["--data: call mlxtune.commands.generate.answer_rows"])
    with closing(RunConsole(quiet=config.quiet, brief=True)) as console:
        session = trained_model.UseSession(config, console)
        reader = session.reader
        content, where = _content(config)
        completes = ""
        if config.messages is None and config.system is None:
            completes = _completes_text(session, named="template" in options.explicit_options)
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
    trained = not named and trained_model.is_trained_on_text(session.adapter)
    return "completed as plain text, as the adapter was trained" if trained else ""


def main(config: GenerateConfig) -> None:
    """Print the answer as it arrives, or as JSON once it is complete; or answer --data."""
    if config.data is not None:
        answer_rows(config)
        return
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


# The rows of a file


@takes_resolved(GenerateConfig)
def answer_rows(options: ResolvedOptions[GenerateConfig]) -> Path:
    """Answer every row of a file, in order, and return the file of answers.

    Each answer is written once it is complete, and has the tokens that `generate` gives for its
    prompt alone. Answers that the file has already are kept if prompts, model and options are the
    same. Raises a subclass of MlxTuneError.
    """
    config = options.config
    data, output = as_path(str(config.data)), as_path(str(config.output))
    if data.is_dir():
        raise DataError(f"{data} is a folder: name a file in it")
    find_data_files([data])
    check_outputs([output], [data], "--output")
    with closing(RunConsole(quiet=config.quiet)) as console:
        session = trained_model.UseSession(config, console)
        completes = _completes_text(session, named="template" in options.explicit_options)
        if not completes:
            session.reader.require_template()
        prompts = list(_prompts(session, data, completes=bool(completes)))
        written = [] if config.overwrite or not output.exists() else _written(output)
        stamps = _stamps(session, [each for _, _, each in prompts])
        if len(written) > len(stamps) or not all(map(_is_stamped, written, stamps)):
            raise OutputError(
                f"{output} has answers to other prompts, of another model or other options, or "
                "changed since: choose another --output, or replace it with --overwrite"
            )
        make_folder(output.parent)
        # Without the line that an interrupted command wrote in part.
        lines = (json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in written)
        write_file(output, lines)
        if written:
            console.say("Resume", f"{output} has the first {pluralize(len(written), 'answer')}")
        todo = list(zip(prompts, stamps, strict=True))[len(written) :]
        _answer(session, output, todo, len(written))
        unanswered = sum(isinstance(prompt, str) for _, _, prompt in prompts)
        without = f", {pluralize(unanswered, 'row')} not answered" if unanswered else ""
        answers = pluralize(len(prompts) - unanswered, "answer")
        console.say("Done", f"{answers} in {output}{without}")
    return output


def _prompts(
    session: trained_model.UseSession[GenerateConfig], data: Path, *, completes: bool
) -> Iterator[tuple[int, dict[str, Any], Prompt | str]]:
    """Yield each row's number, its entries for the output, and its prompt or why it has none."""
    system = session.config.system
    for number, row in read_objects(data):
        place = where(data, number)
        try:
            if isinstance(row, BadRowError):
                raise DataError(f"{place}: {row}")
            content, shown = _conversation(row, place, system)
            if completes and "prompt" in shown:
                prompt = text_prompt(session.reader.encoder, shown["prompt"], place)
            else:
                prompt = prompt_of(session.reader.encoder, content, place)
        except DataError as error:
            yield number, {}, error.with_flags
        else:
            yield number, shown, prompt


def _conversation(
    row: Mapping[str, Any], place: str, system: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the conversation that a row asks to answer, and what the output repeats of it.

    Raises DataError.
    """
    keys = {normalized_key(key): key for key in reversed([*row]) if row[key] is not None}
    messages = row.get("messages")
    prompt_key = next((keys[name] for name in _PROMPTS if name in keys), None)
    empty = next(
        (key for key in row if row[key] is None and normalized_key(key) in _PROMPTS), prompt_key
    )
    if not messages and empty is not None and not str(row[prompt_key or empty] or "").strip():
        raise DataError(f"{place}: {shorten(empty)} is empty: write a prompt, or remove the row")
    if messages is None and prompt_key is None:
        present = ", ".join(map(shorten, [*row][:5])) or "none"
        raise DataError(f"{place}: no 'prompt' or 'messages' (its keys: {present}): rename one")
    text = messages if prompt_key is None or messages is not None else row[prompt_key]
    if isinstance(messages := text, list):
        while messages and role_of(messages[-1]) == "assistant":
            messages = messages[:-1]
        shown: dict[str, Any] = {"messages": messages}
    else:
        text = str(text)
        if normalized_key(str(prompt_key)) == "instruction" and "input" in keys:
            text += f"\n{row[keys['input']]}"
        shown = {"prompt": text}
        messages = [{"role": "user", "content": text}]
    content = {name: row[name] for name in ("system", "tools") if name in row}
    return _with_system({**content, "messages": messages}, system, place), shown


def _stamps(
    session: trained_model.UseSession[GenerateConfig], prompts: Sequence[Prompt | str]
) -> list[str]:
    """Return a hash of each prompt with the model and the options."""
    every = asdict(session.config)
    options = {name: every[name] for name in every.keys() - _NEUTRAL_OPTIONS}
    adapter = None if session.adapter is None else file_hash(session.adapter.path)
    common = [str(session.folder.resolve()), adapter, sorted(options.items())]
    contents = (prompt if isinstance(prompt, str) else prompt.ids for prompt in prompts)
    texts = (json.dumps([*common, content], default=str) for content in contents)
    return [_short_hash(text) for text in texts]


def _with_answer(stamp: str, entry: Mapping[str, Any]) -> str:
    """Return the stamp of a line of the output, by which a resumed command recognises it."""
    return _short_hash(json.dumps([stamp, {**entry, "stamp": ""}]))


def _is_stamped(line: Any, stamp: str) -> bool:
    return isinstance(line, dict) and line.get("stamp") == _with_answer(stamp, line)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _written(output: Path) -> list[Any]:
    """Return the complete lines of a file of answers. Raises OutputError for other files."""
    lines: list[Any] = []
    with as_output_error(output, "--output"), open_regular(output) as file:
        while (line := file.readline(RECORD_LIMITS.bytes + 1)).endswith(b"\n"):
            try:
                lines.append(parse_json(line, RECORD_LIMITS, output.name))
            except ValueError:
                lines.append({})
    return lines


def _answer(
    session: trained_model.UseSession[GenerateConfig],
    output: Path,
    rows: Sequence[tuple[tuple[int, dict[str, Any], Prompt | str], str]],
    done: int,
) -> None:
    """Answer prompts one after another, and append each answer to the output."""
    if not rows:
        return
    config, console = session.config, session.console
    loaded = session.load()
    generator: Generator = trained_model.start_generator(session, loaded)
    sampling = config.part(Sampling)
    try:
        for (number, shown, prompt), stamp in rows:
            entry: dict[str, Any] = {"row": number, **shown}
            if isinstance(prompt, str):
                console.warn(f"{prompt}; row not answered")
                entry["error"] = prompt
            else:
                trained_model.check_prompt_length(prompt, loaded.base, f"row {number}")
                if config.seed is not None:
                    # Answers do not depend on the row at which a command was interrupted.
                    seed(config.seed + number)
                # A cached prefix is computed in other pieces, so that tokens could differ.
                generator.forget()
                answer = generator.answer(prompt, sampling)
                entry |= {"answer": answer.text, "finish_reason": answer.finish_reason}
            entry["stamp"] = _with_answer(stamp, entry)
            append_line(output, json.dumps(entry, ensure_ascii=False))
            done += 1
    except KeyboardInterrupt:
        console.warn(f"{output} has {pluralize(done, 'answer')}: the same command adds the others")
        raise


def _content(config: GenerateConfig) -> tuple[dict[str, Any], str]:
    """Return the conversation to answer, and its name for error messages. Raises DataError."""
    if config.messages is not None:
        where = _STDIN if config.messages == "-" else config.messages
        content = parse_content(_read(config.messages), where)
    else:
        where = "--prompt" if config.prompt is not None else _STDIN
        prompt = config.prompt if config.prompt is not None else _read_prompt()
        content = {"messages": [{"role": "user", "content": prompt}]}
    return _with_system(content, config.system, where), where


def _with_system(content: dict[str, Any], system: str | None, where: str) -> dict[str, Any]:
    """Return a conversation with a system message before it, if one is given. Raises DataError."""
    messages = content.get("messages")
    # Messages that are not a list are rejected later, when the prompt is encoded.
    if system is None or not isinstance(messages, list):
        return content
    first = messages[0] if messages else None
    if content.get("system") or (isinstance(first, dict) and first.get("role") == "system"):
        raise DataError(f"{where}: already has a system message: leave out --system")
    return {**content, "messages": [{"role": "system", "content": system}, *messages]}


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
        raise DataError(f"{_STDIN} is not text in UTF-8 (byte {error.start + 1})") from error
    if not text.strip():
        raise DataError(f"{_STDIN} is empty: pipe a prompt in, or pass --prompt")
    return text


def _read(name: str) -> bytes:
    """Read a file, or standard input for `-`, up to one byte over the limit. Raises DataError."""
    try:
        if name == "-":
            return b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_BYTES + 1)
        return read_start(as_path(name), MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not a file name"
        raise DataError(f"{name} cannot be read: {why}: check --messages") from error
