"""`mlxtune chat`: a conversation in the terminal, or line by line through a pipe.

Answers go to stdout, everything else to stderr.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxtune.backend.text.generate import Generator, Sampling
from mlxtune.commands.prepare.base import with_base_model
from mlxtune.commands.prepare.dataset import Reader
from mlxtune.commands.prepare.interrupt import stop_on_interrupt
from mlxtune.commands.prepare.model import (
    LoadedModel,
    check_prompt_length,
    find_model,
    load_model,
    prompted_as_trained,
    start_generator,
)
from mlxtune.config import ChatConfig, as_path
from mlxtune.core.data.conversation import to_json
from mlxtune.core.data.encode import Encoder
from mlxtune.core.data.prompt import prompt_of
from mlxtune.core.files.files import append_line
from mlxtune.errors import DataError, MemoryLimitError, OutputError
from mlxtune.views.console import RunConsole
from mlxtune.views.output import print_answer, print_line

HELP = """\
/base          answer with the base model
/adapter       answer with the adapter
/reset         start a new conversation
/save [FILE]   append the conversation to a file for train (conversations.jsonl)
/help          show this help
/quit          quit; Ctrl-D does too
Ctrl-C stops an answer. Start a line with // to send a message that starts with /."""
# A pipe may never end a line.
_LONGEST_LINE = 2**20
_SAVE_FILE = "conversations.jsonl"

_note = partial(print_line, stderr=True)


def chat(config: ChatConfig) -> None:
    """Chat with a model until the person quits or standard input ends.

    Raises a child of MlxTuneError for what options, files or the model cause.
    """
    config = with_base_model(prompted_as_trained(config))
    folder = find_model(config)
    with closing(RunConsole(quiet=config.quiet)) as console:
        reader = Reader(config.reading(turns="last"), folder)
        encoder = reader.encoder  # its problems show before minutes of loading
        loaded = load_model(config, folder, console)
        console.say("Chat", "/help lists the commands, Ctrl-D quits")
    generator = start_generator(config, loaded, reader)
    conversation = _Conversation(config, loaded, generator, encoder)
    for line in _lines():
        if line.startswith("/") and not line.startswith("//"):
            if not conversation.run_command(line):
                return
        elif line.strip():
            conversation.send(line.removeprefix("/"))


@dataclass
class _Conversation:
    """The messages so far, and the model that answers them."""

    config: ChatConfig
    loaded: LoadedModel
    generator: Generator
    encoder: Encoder
    messages: list[dict[str, Any]] = field(default_factory=list)
    save_file: str = _SAVE_FILE

    def send(self, text: str) -> None:
        """Send a message and print the answer; without an answer, the message is dropped."""
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt = prompt_of(self.encoder, {"messages": [*self._system(), *asked]}, "message")
            check_prompt_length(prompt, self.loaded.base, "message")
        except DataError as problem:
            _note(f"{problem}; the message was dropped")
            return
        try:
            with stop_on_interrupt(signals=(signal.SIGINT,)) as should_stop:
                sampling = self.config.part(Sampling)
                answer = self.generator.answer(prompt, sampling, print_answer, should_stop)
        except KeyboardInterrupt:
            print_line()
            _note("stopped; the message was dropped")
            return
        except MemoryLimitError as problem:
            print_line()
            _note(f"{problem}; the message was dropped; /reset starts a new conversation")
            return
        print_line()
        if not answer.text.strip():
            _note("the answer is empty; the message was dropped")
            return
        if answer.finish_reason == "length":
            _note("cut at --max-new-tokens")
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]

    def run_command(self, line: str) -> bool:
        """Run a command; return False if it ends the conversation."""
        name, _, argument = line[1:].strip().partition(" ")
        match name, argument:
            case "quit" | "exit", _:
                return False
            case "save", _:
                self._save(argument.strip())
            case "base" | "adapter", "":
                self._switch(on=name == "adapter")
            case "reset", "":
                self.messages = []
                _note("new conversation")
            case "help", "":
                _note(HELP)
            case _:
                _note(f"unknown command: {line}; /help lists the commands")
        return True

    def _switch(self, *, on: bool) -> None:
        if self.loaded.adapted is None:
            _note("there is no adapter: start chat with --adapter")
            return
        self.loaded.use_adapter(on)
        # The generator's cache holds keys and values of the other model.
        self.generator.forget()
        _note(f"the {'adapter' if on else 'base model'} answers from here on")

    def _save(self, name: str) -> None:
        if not self.messages:
            _note("nothing to save yet")
            return
        path = as_path(name or self.save_file)
        try:
            append_line(path, to_json({"messages": [*self._system(), *self.messages]}))
        except OutputError as problem:
            _note(str(problem))
            return
        self.save_file = name or self.save_file
        _note(f"appended to {path}")

    def _system(self) -> list[dict[str, Any]]:
        system = self.config.system
        return [] if system is None else [{"role": "system", "content": system}]


def _lines() -> Iterator[str]:
    """Yield each line of standard input, with a prompt if it is a terminal."""
    if sys.stdin is None:
        return
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  line editing and history
    while True:
        try:
            yield input("> ") if is_terminal else _read_line()
        except EOFError:
            if is_terminal:
                print_line()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print_line()
            _note("Ctrl-D or /quit quits")
        except UnicodeDecodeError as error:
            raise DataError(f"standard input: is not text in UTF-8: {error.reason}") from error


def _read_line() -> str:
    line = sys.stdin.readline(_LONGEST_LINE)
    if not line:
        raise EOFError
    if len(line) == _LONGEST_LINE:
        raise DataError(f"standard input: has a line of more than {_LONGEST_LINE:,} characters")
    return line.rstrip("\r\n")
