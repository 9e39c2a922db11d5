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

import re
import shlex
from pathlib import Path
from typing import ClassVar

# A shell command, whose flags stay, or a flag and its value. A word is a value only if nothing
# follows it in its clause: in `--data needs a file`, the message goes on.
_FLAG = re.compile(
    r"(?P<command>\b(?:mlxtune [a-z]+|hf|pip|mlx[._]\w+|llama-[\w-]+) [^;:]*)"
    r"|(?<![\w/.='\"-])--(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
    r"(?: (?:(?P<number>-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w.]))|'(?P<quoted>[^']*)'"
    r"|(?P<word>[\w@-]+(?:[/=:][\w@-]+)+|[A-Z]+|(?!too\b)[a-z][\w-]*(?=$|[,;)]|: | or | and ))))?"
)


def in_keywords(message: str) -> str:
    """Return a message with Python's keywords in place of flags, except in shell commands."""
    return _FLAG.sub(_keyword, message)


def _keyword(found: re.Match[str]) -> str:
    if found["command"]:
        return found[0]
    name = found["name"].replace("-", "_")
    if found["number"]:
        return f"{name}={found['number'].replace(',', '')}"
    text = found["quoted"] if found["word"] is None else found["word"]
    return name if text is None else f'{name}="{text}"'


class MlxTuneError(Exception):
    """Base of all errors that a user can cause and fix."""

    # Whether messages name options as flags. The command line and its helper processes set this.
    names_flags: ClassVar[bool] = False

    def __str__(self) -> str:
        text = super().__str__()
        return text if MlxTuneError.names_flags else in_keywords(text)


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
            here = f", or in Python with mlxtune.resume({str(_short(checkpoint.parent))!r})"
        super().__init__(f"interrupted after step {step}; {self.saved}{here}")

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
    return f"mlxtune train --resume {shlex.quote(str(_short(run)))}"


def _short(run: Path) -> Path:
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
