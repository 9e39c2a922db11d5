"""`mlxtune chat`: a conversation in the terminal, or line by line through a pipe.

Answers go to stdout, everything else to stderr.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxtune.backend.text.generate import Answer
from mlxtune.config import ChatConfig, as_path
from mlxtune.core.data.conversation import to_json
from mlxtune.core.data.encode import Encoder
from mlxtune.core.data.prompt import Prompt, prompt_of
from mlxtune.core.files.writing import append_line
from mlxtune.errors import DataError, MemoryLimitError, OutputError
from mlxtune.session import trained_model
from mlxtune.session.interrupt import stop_on_interrupt
from mlxtune.views.console import RunConsole
from mlxtune.views.output import AnswerConsole, print_line

HELP = """\
/base          answer with the base model
/adapter       answer with the adapter
/both          answer with both, side by side
/reset         start a new conversation
/save [FILE]   append the conversation to a file for train (conversations.jsonl)
/help          show this help
/quit          quit; Ctrl-D does too
Ctrl-C stops an answer. Start a line with // to send a message that starts with /."""
# The largest number of characters in a line of input: a pipe may send an endless line.
_MAX_LINE_CHARS = 2**20
_SAVE_FILE = "conversations.jsonl"
_MODEL_NAMES = {False: "base model", True: "adapter"}

_note = partial(print_line, stderr=True)


def chat(config: ChatConfig) -> None:
    """Chat with a model until the user quits or standard input ends.

    Raises a subclass of MlxTuneError for errors in options, files or the model.
    """
    with closing(RunConsole(quiet=config.quiet, brief=True)) as console:
        session = trained_model.UseSession(config, console)
        session.reader.require_template()
        session.reader.warn_of_thinking(config.thinking, console)
        if trained_model.is_trained_on_text(session.adapter):
            console.warn("the adapter was trained on plain text: mlxtune generate completes text")
        encoder = session.reader.encoder  # report problems before the model loads for minutes
        loaded = session.load()
        answerers = trained_model.Answerers(session, loaded)
        conversation = _Conversation(session.config, loaded, answerers, encoder, console)
        who = conversation.who
        console.say("Chat", f"{who}; /help lists the commands, Ctrl-D quits")
    for line in _lines():
        if line.strip().lower() in ("exit", "quit"):
            return
        if line.startswith("/") and not line.startswith("//"):
            if not conversation.run_command(line):
                return
        elif line.strip():
            conversation.send(line.removeprefix("/"))


@dataclass
class _Conversation:
    """A conversation; `messages` has key False for the base model, and True for the adapter."""

    config: ChatConfig
    loaded: trained_model.LoadedModel
    answerers: trained_model.Answerers
    encoder: Encoder
    console: RunConsole
    messages: dict[bool, list[dict[str, Any]]] = field(default_factory=dict)
    save_file: str = _SAVE_FILE

    def __post_init__(self) -> None:
        has_adapter = self.loaded.adapted is not None
        self.messages = {on: [] for on in ((False, True) if self.config.both else (has_adapter,))}

    @property
    def who(self) -> str:
        """A phrase that names each answering model and its path."""
        base, adapter = f"the base model {self.config.model_path}", ""
        if self.loaded.adapted is not None:
            adapter = f"the adapter {self.loaded.adapted.file.path}"
        if len(self.messages) == 2:
            return f"{base} and {adapter} answer side by side"
        return f"{adapter if True in self.messages else base} answers"

    def send(self, text: str) -> None:
        """Send a message and print the answer; if there is no answer, forget the message."""
        histories = {
            on: [*messages, {"role": "user", "content": text}]
            for on, messages in self.messages.items()
        }
        try:
            prompts = {on: self._prompt(messages) for on, messages in histories.items()}
        except DataError as problem:
            _note(f"{problem}; the message was dropped")
            return
        try:
            with stop_on_interrupt(signals=(signal.SIGINT,)) as should_stop:
                answers = self._answers(prompts, should_stop)
        except KeyboardInterrupt:
            _note("stopped; the message was dropped")
            return
        except MemoryLimitError as problem:
            _note(f"{problem}; the message was dropped; /reset starts a new conversation")
            return
        if not all(answer.text.strip() for answer in answers.values()):
            _note("the answer is empty; the message was dropped")
            return
        if any(answer.finish_reason == "length" for answer in answers.values()):
            _note("the answer was cut at --max-new-tokens")
        for on, answer in answers.items():
            self.messages[on] = [*histories[on], {"role": "assistant", "content": answer.text}]

    def _prompt(self, messages: list[dict[str, Any]]) -> Prompt:
        """Return the prompt for the next answer. Raises DataError."""
        prompt = prompt_of(self.encoder, {"messages": [*self._system(), *messages]}, "message")
        trained_model.check_prompt_length(prompt, self.loaded.base, "message")
        return prompt

    def _answers(
        self, prompts: dict[bool, Prompt], should_stop: Callable[[], bool]
    ) -> dict[bool, Answer]:
        """Print the answers as they arrive, and return them."""
        answers: dict[bool, Answer] = {}
        trained_model.await_result(self.console)
        with (
            closing(self.console),
            closing(AnswerConsole([_MODEL_NAMES[on] for on in prompts])) as console,
        ):
            for on, piece in self.answerers.answer(prompts, should_stop):
                self.console.result_arrived()
                if isinstance(piece, Answer):
                    answers[on] = piece
                else:
                    console.add(_MODEL_NAMES[on], piece)
        return answers

    def run_command(self, line: str) -> bool:
        """Run a command; return False if it ends the conversation."""
        name, _, argument = line[1:].strip().partition(" ")
        match name, argument:
            case "quit" | "exit", _:
                return False
            case "save", _:
                self._save(argument.strip())
            case "base" | "adapter" | "both", "":
                self._switch(name)
            case "reset", "":
                self.messages = {on: [] for on in self.messages}
                _note("new conversation")
            case "help", "":
                _note(HELP)
            case _:
                _note(f"unknown command: {line}; /help lists the commands")
        return True

    def _switch(self, name: str) -> None:
        if self.loaded.adapted is None:
            _note("there is no adapter: start chat with --adapter")
            return
        # A newly chosen model continues the conversation of the other model.
        latest = self.messages[max(self.messages)]
        selected = {"base": (False,), "adapter": (True,), "both": (False, True)}[name]
        self.messages = {on: self.messages.get(on, latest) for on in selected}
        _note(f"{self.who} from now on")

    def _save(self, name: str) -> None:
        # If both models answer, save the conversation with the adapter.
        messages = self.messages[max(self.messages)]
        if not messages:
            _note("nothing to save yet")
            return
        path = as_path(name or self.save_file)
        if path.suffix != ".jsonl":
            _note(f"{path}: conversations are JSON lines: choose a name that ends in .jsonl")
            return
        try:
            append_line(path, to_json({"messages": [*self._system(), *messages]}))
        except OutputError as problem:
            _note(str(problem))
            return
        self.save_file = name or self.save_file
        _note(f"appended to {path}")

    def _system(self) -> list[dict[str, Any]]:
        system = self.config.system
        return [] if system is None else [{"role": "system", "content": system}]


def _lines() -> Iterator[str]:
    """Yield each line of standard input, after a prompt if standard input is a terminal."""
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
    line = sys.stdin.readline(_MAX_LINE_CHARS)
    if not line:
        raise EOFError
    if len(line) == _MAX_LINE_CHARS:
        raise DataError(f"standard input: has a line of more than {_MAX_LINE_CHARS:,} characters")
    return line.rstrip("\r\n")
