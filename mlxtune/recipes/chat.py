"""The recipe of `mlxtune chat`: a conversation in the terminal, or line by line through a pipe.

Answers go to stdout, all else to stderr. What it needs is imported in the functions, as in train.py.
"""  # noqa: E501

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxtune.config import ChatConfig, as_path
from mlxtune.errors import DataError, MemoryLimitError, OutputError, printable
from mlxtune.setup.model import (
    LoadedModel,
    asking_reader,
    check_fits,
    find_model,
    load_model,
    print_text,
    start_generator,
)

if TYPE_CHECKING:
    from mlxtune.backend.text.generate import Answer, Generator, Sampling
    from mlxtune.core.data.encode import Encoder

HELP = """\
/base          answer with the base model
/adapter       answer with the adapter
/reset         begin a new conversation
/save [FILE]   append the conversation to a file that train reads (conversations.jsonl)
/help          show this
/quit          end; so does Ctrl-D
Ctrl-C stops an answer. A line that begins with // is said with one of them."""
# Of a pipe, which may have no line's end at all.
_LONGEST_LINE = 2**20
_SAVED = "conversations.jsonl"


def chat(config: ChatConfig) -> None:
    """Talk with a model until standard input or the person ends it.

    Raises a child of MlxTuneError for what options, files or the model cause.
    """
    from mlxtune.terminal.console import RunConsole

    folder = find_model(config)
    with closing(RunConsole(quiet=config.quiet)) as console:
        reader = asking_reader(config, folder)
        used = load_model(config, folder, console)
        console.say("Chat", "/help lists the commands, Ctrl-D ends")
    generator, sampling = start_generator(config, used, reader)
    conversation = _Conversation(used, generator, sampling, reader.encoder, config.system)
    for line in _lines():
        if line.startswith("/") and not line.startswith("//"):
            if not conversation.obey(line):
                return
        elif line.strip():
            conversation.say(line[1:] if line.startswith("//") else line)


@dataclass
class _Conversation:
    """What has been said, and what answers it."""

    used: LoadedModel
    generator: Generator
    sampling: Sampling
    encoder: Encoder
    system: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    saved_to: str = _SAVED

    def say(self, text: str) -> None:
        """Say something, and print the answer as it comes."""
        from mlxtune.core.data.prompt import prompt_of

        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt = prompt_of(self.encoder, {"messages": [*self._system(), *asked]}, "this")
            check_fits(prompt, self.used, "this")
        except DataError as problem:
            _tell(f"{problem}; it was not said")
            return
        try:
            with _stopping() as should_stop:
                answer = self.generator.answer(prompt, self.sampling, print_text, should_stop)
        except KeyboardInterrupt:
            print()
            _tell("stopped; it was not said")
            return
        except MemoryLimitError as problem:
            print()
            _tell(f"{problem}; it was not said, and /reset begins anew")
            return
        print()
        self._take(asked, answer)

    def _take(self, asked: list[dict[str, Any]], answer: Answer) -> None:
        if not answer.text.strip():
            _tell("no answer; it was not said")
            return
        if answer.finish_reason == "length":
            _tell("cut at --max-new-tokens")
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]

    def obey(self, line: str) -> bool:
        """Do what a command says; tell whether the conversation goes on."""
        name, _, rest = line[1:].strip().partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "base": lambda: self._switch(on=False),
            "adapter": lambda: self._switch(on=True),
            "reset": self._reset,
            "help": lambda: _tell(HELP),
        }
        if name in ("quit", "exit"):
            return False
        if name == "save":
            self._save(rest.strip())
        elif name in commands and not rest:
            commands[name]()
        else:
            _tell(f"no such command: {line}; /help lists them")
        return True

    def _switch(self, *, on: bool) -> None:
        if self.used.adapted is None:
            _tell("there is no adapter: name one with --adapter")
            return
        self.used.use_adapter(on)
        # What was run of the conversation was run by the other.
        self.generator.forget()
        _tell(f"answers come from {'the adapter' if on else 'the base model'} from here on")

    def _reset(self) -> None:
        self.messages = []
        _tell("a new conversation")

    def _save(self, name: str) -> None:
        from mlxtune.core.data.conversation import to_json
        from mlxtune.core.machine.files import append_line

        if not self.messages:
            _tell("nothing has been said")
            return
        path = as_path(name or self.saved_to)
        try:
            append_line(path, to_json({"messages": [*self._system(), *self.messages]}))
        except OutputError as problem:
            _tell(str(problem))
            return
        self.saved_to = name or self.saved_to
        _tell(f"appended to {path}")

    def _system(self) -> list[dict[str, Any]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def _lines() -> Iterator[str]:
    """Yield what is said, line by line, asked for where there is a terminal."""
    if sys.stdin is None:
        return
    asks = sys.stdin.isatty()
    if asks:
        with suppress(ImportError):
            import readline  # noqa: F401  editing and history of lines
    while True:
        try:
            yield input("> ") if asks else _read_line()
        except EOFError:
            if asks:
                print()
            return
        except KeyboardInterrupt:
            if not asks:
                raise
            print()
            _tell("Ctrl-D or /quit ends")
        except UnicodeDecodeError as error:
            raise DataError(f"standard input: is not text in UTF-8: {error.reason}") from error


def _read_line() -> str:
    line = sys.stdin.readline(_LONGEST_LINE)
    if not line:
        raise EOFError
    if len(line) == _LONGEST_LINE:
        raise DataError(f"standard input: has a line of more than {_LONGEST_LINE:,} characters")
    return line.rstrip("\r\n")


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Within it, a first Ctrl-C makes the yielded function return True; a second one interrupts."""
    asked: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
