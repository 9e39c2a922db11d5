"""What can go wrong through what a person gave, as exceptions.

MlxTuneError
├── ConfigError            an option or a config file          (also ValueError)
├── ModelError             a model folder                      (also ValueError)
├── DataError              a data file                         (also ValueError)
├── OutputError            a file or folder to be written      (also OSError)
├── MemoryLimitError       a run that does not fit             (also MemoryError)
└── NonFiniteLossError     a loss that is not a number         (also FloatingPointError)

Each message is one line that names the file, line or option and the remedy. Anything else that
is raised is a bug and keeps its traceback.
"""

from __future__ import annotations

from pathlib import Path

_QUOTED = 60


class MlxTuneError(Exception):
    """Base of all errors that a person can cause and mend."""


class ConfigError(MlxTuneError, ValueError):
    """One or more options are missing, unknown or out of range.

    `problems` holds one sentence for each; the message joins them.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ModelError(MlxTuneError, ValueError):
    """A model folder cannot be loaded, or has not what was asked of it."""


class DataError(MlxTuneError, ValueError):
    """A data file cannot be read, or holds no row to train on."""


class OutputError(MlxTuneError, OSError):
    """A file or folder cannot be written."""


class MemoryLimitError(MlxTuneError, MemoryError):
    """Even one example at a time takes more memory than there is."""


class NonFiniteLossError(MlxTuneError, FloatingPointError):
    """A loss or gradient is infinite or not a number."""


class TrainingInterrupted(KeyboardInterrupt):
    """Training stopped between two steps because the person asked; the state is saved.

    `checkpoint` is the folder that holds it, or None when no step had been taken yet; `signal` the
    number of the signal that asked.
    """

    signal = 2  # SIGINT

    def __init__(self, checkpoint: Path | None, step: int) -> None:
        super().__init__(f"interrupted after step {step}")
        self.checkpoint = checkpoint
        self.step = step


def printable(text: str) -> str:
    """Return a text in which what a terminal would act on is escaped; newlines stay."""
    return "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def shorten(text: str) -> str:
    """Quote text from a file for a message: bounded, and with control characters escaped."""
    return repr(text if len(text) <= _QUOTED else text[:_QUOTED] + "…")


def one_line(error: BaseException) -> str:
    """Return another library's message on one line and bounded, to stand in one of ours."""
    spaced = "".join(c if c.isprintable() else " " for c in str(error))
    text = " ".join(spaced.split()) or type(error).__name__
    return text if len(text) <= 300 else text[:299] + "…"
