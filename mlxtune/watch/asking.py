"""Asks the model that answers questions on the page, in a process started on demand.

The process loads the model of one run, answers one question at a time, and ends after some minutes
without a question, when a question is for another run, or when the server ends.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxtune.config.limits import RECORD_LIMITS, parse_json
from mlxtune.core.files.processes import PIPE, Process, end, own_environment, python, start
from mlxtune.core.files.remembered import is_own
from mlxtune.core.run.stored_run import Run, read_run
from mlxtune.core.run.summary import RunView
from mlxtune.errors import ConfigError, MlxTuneError, OutputError

# The longest question in characters, the longest answer in tokens, and the time limit for loading
# the model and answering, in seconds.
MAX_QUESTION_CHARS, _MAX_ANSWER_TOKENS, _SECONDS = 16_000, 512, 600.0
# Seconds without a question after which the model is freed.
_KEPT_SECONDS = 300.0
_HELPER = "mlxtune.watch.answer_helper"


@dataclass
class Question:
    """A question for a run's model, and the answers of the base model and the adapter so far.

    `status` is the current work of the process, and empty once that work is done.
    """

    run: Path
    text: str
    base: str = ""
    adapter: str = ""
    status: str = "loading the model"
    problem: str = ""
    notes: list[str] = field(default_factory=list)


class Asker:
    """Asks the models of runs; `on_change` is called whenever a question or its answers change."""

    def __init__(self, seconds: float = _SECONDS, kept_seconds: float = _KEPT_SECONDS) -> None:
        self._seconds, self._kept_seconds = seconds, kept_seconds
        self._lock = threading.Lock()
        self._question: Question | None = None
        self._process: Process | None = None
        self._of: Path | None = None
        self._letting_go: threading.Timer | None = None
        self.on_change: Callable[[], None] = lambda: None

    def ask(self, run: Path, question: object) -> None:
        """Start to answer a question; `question_of` returns it with its answers.

        Raises ConfigError if the question is empty, not text or too long. Raises OutputError if
        another answer is in progress or this run's model cannot answer.
        """
        if not isinstance(question, str) or not question.strip():
            raise ConfigError(["the question is empty"])
        if len(question) > MAX_QUESTION_CHARS:
            raise ConfigError([f"the question has more than {MAX_QUESTION_CHARS:,} characters"])
        options = _options_of(read_run(run))
        with self._lock:
            if self._question is not None and self._question.status:
                raise OutputError("another question is being answered: wait for its answers")
            self._question = new = Question(run, question)
        self.on_change()
        threading.Thread(target=self._answer, args=(new, options), daemon=True).start()

    def question_of(self, run: Path) -> Question | None:
        """Return the last question, if it was for this run's model."""
        question = self._question
        return question if question is not None and question.run == run else None

    def cancel(self) -> None:
        """Stop the current answer by ending the process."""
        question = self._question
        if question is not None and question.status:
            question.problem = "stopped"
            self.close()

    def close(self) -> None:
        """End the process and free its memory."""
        with self._lock:
            if self._letting_go is not None:
                self._letting_go.cancel()
            process, self._process, self._of = self._process, None, None
        if process is not None:
            end(process)

    def _answer(self, question: Question, options: dict[str, Any]) -> None:
        try:
            process = self._process_of(question.run, options)
        except OSError as problem:
            question.problem, question.status = f"no process could be started: {problem}", ""
            self.on_change()
            return
        limit = threading.Timer(self._seconds, self._give_up, (question,))
        limit.daemon = True
        limit.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            # `cancel` may have been called before the process started.
            if question.problem:
                raise OSError(question.problem)
            process.stdin.write(json.dumps(question.text).encode() + b"\n")
            process.stdin.flush()
            while question.status:
                line = parse_json(
                    process.stdout.readline(RECORD_LIMITS.bytes), RECORD_LIMITS, "the answer"
                )
                self._add(question, line)
        except (OSError, ValueError):
            # `cancel` or the time limit ended the process and set the problem, or the process ended
            # unexpectedly, for example for lack of memory.
            question.problem = question.problem or "the process that answers has ended"
            self.close()
        finally:
            limit.cancel()
            question.status = ""
            self._let_go_later()
            self.on_change()

    def _add(self, question: Question, line: dict[str, Any]) -> None:
        """Add a line of the process to the question's answers and state."""
        question.base += line.get("base", "")
        question.adapter += line.get("adapter", "")
        question.notes += line.get("notes", [])
        question.problem = line.get("problem", question.problem)
        question.status = line.get("status", question.status)
        self.on_change()

    def _process_of(self, run: Path, options: dict[str, Any]) -> Process:
        """Return the process for a run's model, started if needed. Raises OSError."""
        with self._lock:
            if self._letting_go is not None:
                self._letting_go.cancel()
            running = self._process is not None and self._process.poll() is None
            if running and self._of == run:
                assert self._process is not None
                return self._process
        self.close()
        process = start(
            python("-m", _HELPER, json.dumps(options)),
            stdin=PIPE,
            stdout=PIPE,
            environment=own_environment(),
        )
        with self._lock:
            self._process, self._of = process, run
        return process

    def _give_up(self, question: Question) -> None:
        question.problem = f"the answers were not complete within {self._seconds:.0f} seconds"
        self.close()

    def _let_go_later(self) -> None:
        with self._lock:
            self._letting_go = threading.Timer(self._kept_seconds, self.close)
            self._letting_go.daemon = True
            self._letting_go.start()


def problem_of(run: Run) -> str:
    """Return why a run's model cannot answer questions; empty if it can."""
    try:
        _options_of(run)
    except MlxTuneError as problem:
        return str(problem)
    return ""


def _options_of(run: Run) -> dict[str, Any]:
    """Return the options with which a run's model answers. Raises OutputError if it cannot."""
    view = RunView.of(run)
    if not view.finished or not view.adapter or not Path(view.adapter).is_file():
        raise OutputError("the model can be asked once the run has ended with an adapter")
    # Another user's run could name a model to download, or a harmful model.
    if not is_own(run.folder):
        raise OutputError(
            "this run was not made by you on this machine: ask its model with mlxtune chat "
            f"--both --adapter {run.name}"
        )
    return {"adapter": view.adapter, "max_new_tokens": _MAX_ANSWER_TOKENS}
