"""Errors that a user can cause and fix.

MlxTuneError
├── ConfigError            an option or a config file          (also ValueError)
├── ModelError             a model folder                      (also ValueError)
├── DataError              a data file                         (also ValueError)
├── OutputError            a file or folder to be written      (also OSError)
├── MemoryLimitError       a run that does not fit             (also MemoryError)
├── GpuError               work that the GPU stopped           (also RuntimeError)
├── WorkerError            another worker of a run             (also RuntimeError)
└── NonFiniteLossError     a loss that is not a number         (also FloatingPointError)

Each message is one line that names the file, line or option and the remedy. Any other exception
is a bug and keeps its traceback.

Messages are written with flags (`--val-split 0`). The command line shows them so; Python shows
keywords (`val_split=0`).
"""

import json
import re
import shlex
from pathlib import Path
from typing import ClassVar

# Options without a value, and words that are values even where a clause continues after them.
SWITCHES = (
    "allow_sleep|auto|both|correct|dequantize|dora|double_quant|force|generate|gguf|ignore_ledger|"
    "json|longest|mask_truncated|merge|merge_system|no_cache|other_base|overwrite|pause_on_battery|quiet|rslora|strict|"
    "trust_remote_code|wait"
)
_CHOICE = re.compile(
    "dequantized|dpo|exo_pair|float16|float32|gguf|grpo|kto|last|mxfp4|nf4|peft|pissa|quantized|tensor|"
    "text"
)
COMMANDS = (
    "bench|chat|demo|doctor|eval|export|fuse|generate|import|inspect|plan|push|report|reward|"
    "runs|serve|train|verify|watch"
)
# A shell command, whose flags stay, or a flag and the word after it.
_FLAG = re.compile(
    rf"(?P<command>\b(?:mlxtune (?:{COMMANDS})|hf|pip|mlx[._][\w.]+|llama-[\w-]+|llama\.cpp) "
    r"(?:'[^']*'|(?!, |; |: | or )[^'])*)"
    r"|(?<![\w/.='\"-])--(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
    r"(?: (?:(?P<number>-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\.?\w))"
    r"|(?P<word>(?!-)(?:[^\s'\",;:()]|'[^']*'|\"[^\"]*\"|:(?=\S))+(?<!\.))))?"
)
_CLAUSE_END = re.compile(r"$|[,;)]|: | or | and ")
_LOWERCASE_WORD = re.compile(r"(?!(?:out|too)$)[a-z][\w-]*")
_VALUE = re.compile(r"['\"A-Z\d]|\S*[/=:.]\w|\w+=")
# What precedes a switch that a remedy sets, such as `use --cache-dir or `.
_SETTING = re.compile(
    r"\b(?:add|give|pass|set|try|use|with)(?: --[a-z-]+(?: [^\s,;:]+)?(?: and| or)?)* $"
)
_TEXT = r'"(?:[^"\\]|\\.)*"'
_REPEATED_KEYWORD = re.compile(rf"\b(?P<name>\w+)={_TEXT}(?:, (?P=name)={_TEXT})+")


def in_keywords(message: str) -> str:
    """Return a message with Python's keywords in place of flags, except in shell commands."""
    return _REPEATED_KEYWORD.sub(_collected, _FLAG.sub(_keyword, message))


def as_called(message: str) -> str:
    """Return a message with flags on the command line, and with keywords in Python."""
    return message if MlxTuneError.names_flags else in_keywords(message)


def _keyword(match: re.Match[str]) -> str:
    if match["command"]:
        return match[0]
    name, word, rest = match["name"].replace("-", "_"), match["word"], match.string[match.end() :]
    # Flags of a command line are arguments of a call.
    comma = "," if rest.startswith(" --") else ""
    if match["number"]:
        return f"{name}={match['number'].replace(',', '')}{comma}"
    switch = re.fullmatch(SWITCHES, name) is not None
    # --json of `bench` takes a file.
    if word and (name == "json" or not switch) and _is_value(word, rest):
        return f"{name}={_quoted(''.join(shlex.split(word)))}{comma}"
    if switch and _SETTING.search(match.string[: match.start()]):
        name += "=True"
    return f"{name} {word}" if word else name + comma


def _is_value(word: str, rest: str) -> bool:
    """Return whether a word after a flag is its value: in `--data needs a file`, it is not."""
    if _CHOICE.fullmatch(word) or _VALUE.match(word):
        return True
    return _LOWERCASE_WORD.fullmatch(word) is not None and _CLAUSE_END.match(rest) is not None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _collected(match: re.Match[str]) -> str:
    """Return one keyword in place of a repeated one."""
    name = match["name"]
    values = [json.loads(each) for each in re.findall(_TEXT, match[0])]
    if name != "field":
        return f"{name}=[{', '.join(map(_quoted, values))}]"
    pairs = (value.partition("=") for value in values)
    return f"field={{{', '.join(f'{_quoted(key)}: {_quoted(text)}' for key, _, text in pairs)}}}"


class MlxTuneError(Exception):
    """Base of all errors that a user can cause and fix."""

    # Whether messages name options as flags. The command line and its helper processes set this.
    names_flags: ClassVar[bool] = False

    def __str__(self) -> str:
        return as_called(self.with_flags)

    @property
    def with_flags(self) -> str:
        """The message with flags, for records and for longer messages."""
        return super().__str__()


class ConfigError(MlxTuneError, ValueError):
    """Options are missing, unknown or out of range.

    `problems` has a sentence for each problem; the message joins these sentences.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ModelError(MlxTuneError, ValueError):
    """A model folder cannot be loaded, or lacks something that the options need."""


class DataError(MlxTuneError, ValueError):
    """A data file cannot be read, or has no row to train on."""


class OutputError(MlxTuneError, OSError):
    """A file or folder cannot be written."""


class MemoryLimitError(MlxTuneError, MemoryError):
    """Not even one example fits into memory, or other runs have reserved the memory."""


class GpuError(MlxTuneError, RuntimeError):
    """The GPU stopped the work, and no further attempt succeeded."""


class WorkerError(MlxTuneError, RuntimeError):
    """Another worker is gone, or has different data, weights, options or versions."""


class NonFiniteLossError(MlxTuneError, FloatingPointError):
    """A loss or gradient is infinite or not a number."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the work, so unfinished files are removed; `signal` is the signal's number."""

    signal = 2  # SIGINT


class TrainingInterrupted(KeyboardInterrupt):
    """Training stopped between two steps on request, with its state saved.

    `checkpoint` is the folder with the state, or None before the first step. `signal` is the number
    of the signal that stopped the run, if `by_signal`.
    """

    signal = 2  # SIGINT
    by_signal = False

    def __init__(self, checkpoint: Path | None, step: int) -> None:
        self.checkpoint = checkpoint
        self.step = step
        here = ""
        if checkpoint is not None:
            here = f", or in Python with mlxtune.resume({str(_run_of(checkpoint.parent))!r})"
        super().__init__(f"{self.shell_message}{here}")

    @property
    def shell_message(self) -> str:
        """The message without the way to resume in Python."""
        return f"interrupted after step {self.step}; {self.saved}"

    @property
    def saved(self) -> str:
        """A phrase that names the folder with the saved state, and the command to resume."""
        if self.checkpoint is None:
            return "nothing to save"
        return f"saved to {self.checkpoint}; resume with {resume_command(self.checkpoint.parent)}"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of a traceback."""
        return [str(self)]


def resume_command(run: Path) -> str:
    """Return the command that resumes the run in a folder."""
    return f"mlxtune train --resume {shlex.quote(str(_run_of(run)))}"


def _run_of(run: Path) -> Path:
    """Return the parent of a folder named `checkpoints`, or else the folder itself."""
    return run.parent if run.name == "checkpoints" and run.parent.name else run


def printable(text: str) -> str:
    """Return text as one line: escape line breaks, terminal controls and hidden characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str) -> str:
    """Quote at most 60 characters of `text` for a message, with control characters escaped."""
    return repr(text if len(text) <= 60 else text[:60] + "…")


def one_line(error: BaseException | str) -> str:
    """Return an error's message as one line of at most 300 characters, to quote elsewhere."""
    spaced = "".join(c if c.isprintable() else " " for c in str(error))
    text = " ".join(spaced.split()) or type(error).__name__
    return text if len(text) <= 300 else text[:299] + "…"
