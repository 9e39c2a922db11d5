"""Scores sampled answers: users' functions and schemas run in a process that may be ended anytime.

A function that does not return in time, or ends its process, leaves its answer without a reward;
the process is started again, and the other answers are scored.
"""

import builtins
import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from mlxtune.config.limits import RECORD_LIMITS, parse_json
from mlxtune.core.data.prompt import PromptRow
from mlxtune.core.files.processes import LimitedProcess, ProcessEndedError
from mlxtune.core.formatting import byte_size
from mlxtune.core.objectives.policy import MAX_REWARD
from mlxtune.errors import ConfigError
from mlxtune.rewards import reward_helper
from mlxtune.rewards.functions import (
    INVALID,
    NoRewardError,
    RewardSpec,
    json_value,
    without_thinking,
)
from mlxtune.views.output import print_answer

# The memory that functions may take in addition to the memory of their imports.
_MAX_MEMORY = 4 * 10**9
# Seconds that the imports of users' files may take.
_IMPORT_SECONDS = 120.0
_MAX_REPLY = 2**16
# Starts the reason of a process that a signal ended, as the system does for lack of memory.
_BY_A_SIGNAL = "exit status -"
# An error that a function raised: its name, and its message.
_RAISED = re.compile(rf": {reward_helper.RAISED}(\w+)(.*)", re.DOTALL)
# Faults of the code or of the machine, not of an answer.
_BY_NO_ANSWER = (NameError, ImportError, OSError)
# The most bytes of the functions' own output to print.
_MAX_OUTPUT = 2**16


@dataclass(frozen=True)
class Reward:
    """The reward of an answer: the unweighted values by name, and their weighted sum.

    A value is None if there is none, and the sum is None if any value is. `problems` has a sentence
    for each, with the row and the reward.
    """

    values: dict[str, float | None]
    total: float | None
    problems: tuple[str, ...]


def unrewarded_text(count: int, total: int, noun: str, reason: str) -> str:
    """Return a sentence on answers or rows without a reward; `reason` is the first one's."""
    have = "has" if count == 1 else "have"
    return f"{count:,} of {total:,} {noun} {have} no reward; the first: {reason}"


def with_remedy(sentence: str) -> str:
    """Add to a sentence how a function can score an answer that made it raise an error."""
    raised = _RAISED.search(sentence)
    by_answer = raised is not None and _is_by_answer(*raised.groups())
    return sentence + ": return 0 if such an answer is wrong" * by_answer


def _is_by_answer(name: str, message: str) -> bool:
    """Return whether an answer can be the cause of an error, given the error's name."""
    kind = getattr(builtins, name, Exception)
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        kind = Exception
    if not issubclass(kind, Exception) or issubclass(kind, _BY_NO_ANSWER):
        return False
    is_of_module = kind is AttributeError and "module '" in message.partition(" has no ")[0]
    return not is_of_module and reward_helper.ROW_KEYS not in message


def mean_of(rewards: Iterable[float | None]) -> float | None:
    """Return the mean of the rewards that there are; None if there is none."""
    values = [value for value in rewards if value is not None]
    return fmean(values) if values else None


class RewardScorer:
    """Computes rewards; a function may take `timeout` seconds for an answer.

    Prints what users' functions print on stderr, up to a limit. Functions are called in `folder`,
    or else the current folder. As a context manager, imports the functions, and ends their process
    with all that it started. Raises ConfigError for a file that cannot be imported, and for two
    rewards of one name.
    """

    def __init__(
        self, rewards: Sequence[RewardSpec], timeout: float, folder: Path | None = None
    ) -> None:
        self.rewards = tuple(rewards)
        self._weights = {spec.name: spec.weight for spec in rewards}
        if len(self._weights) < len(rewards):
            raise ConfigError(["two rewards have the same name: rename one, or leave it out"])
        self._built_in = {spec.name: spec.built_in() for spec in rewards if spec.content is None}
        # The functions and schemas, as the process imports them.
        self._functions = [
            _import_function(spec, spec.content) for spec in rewards if spec.content is not None
        ]
        self._schemas = {name for name, *_, function in self._functions if function is None}
        self._ids, self._timeout, self._folder = count(), timeout, folder
        # The bytes of functions' output that are still to show.
        self._left, self._decoder = _MAX_OUTPUT, codecs.getincrementaldecoder("utf-8")("replace")
        self._process: LimitedProcess | None = None

    @property
    def hash(self) -> str:
        """A hash of the rewards, with the content of their files and of the modules beside them."""
        parts = [
            [
                *(spec.name, spec.weight),
                "" if spec.content is None else _sha256(spec.content),
                *([path, _sha256(content)] for path, content in spec.modules),
            ]
            for spec in self.rewards
        ]
        return f"sha256:{_sha256(json.dumps(parts).encode())}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def score(self, row: PromptRow, text: str) -> Reward:
        """Return the reward of an answer to a row, which depends on no other answer."""
        values: dict[str, float | None] = dict.fromkeys(self._weights)
        total, problems, place = 0.0, list[str](), row.place
        for name, weight in self._weights.items():
            try:
                values[name] = value = self._value(name, row, text)
                total += weight * value
            except NoRewardError as problem:
                problems.append(f"{place}: reward {name}: {problem}")
        if not abs(total) <= MAX_REWARD:
            problems.append(
                f"{place}: the sum of the rewards is {total:g}, beyond {MAX_REWARD:g}: lower the "
                "weights"
            )
        return Reward(values, None if problems else total, tuple(problems))

    def _value(self, name: str, row: PromptRow, text: str) -> float:
        if (score := self._built_in.get(name)) is not None:
            return score(text, row.answer)
        if name in self._schemas:
            value = json_value(without_thinking(text))
            arguments = {"value": value, "seconds": self._timeout}
            return 0.0 if value is INVALID else self._call(name, arguments)
        value = self._call(name, {"prompt": row.prompt, "completion": text, "row": {**row.row}})
        if abs(value) > MAX_REWARD:
            raise NoRewardError(f"returned {value:g}: return a number up to {MAX_REWARD:g}")
        return value

    def _start(self, *, again: bool = True) -> None:
        """Start the process if there is none; once more if a signal ends it.

        Raises ConfigError if a file cannot be imported.
        """
        if self._process is not None or not self._functions:
            return
        # Sets have one order in all processes.
        self._process = LimitedProcess(
            Path(reward_helper.__file__),
            _MAX_MEMORY,
            on_message=self._show,
            folder=self._folder,
            variables={"PYTHONHASHSEED": "0"},
        )
        try:
            reply = self._ask(self._functions, _IMPORT_SECONDS)
            problem = f"reward {reply.get('path')} {reply.get('error')}" if reply else ""
        except ProcessEndedError as error:
            if again and error.reason.startswith(_BY_A_SIGNAL):
                self._close()
                self._start(again=False)
                return
            files = " or ".join(dict.fromkeys(path for _, path, *_ in self._functions))
            problem = f"importing {files} {_why(error.reason, f'{_IMPORT_SECONDS:g} s')}"
        if problem:
            self._close()
            raise ConfigError([problem])

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _call(self, name: str, arguments: Mapping[str, Any]) -> float:
        """Return a function's value. Raises NoRewardError if it has none."""
        content = json.dumps([name, arguments], sort_keys=True, default=str).encode()
        seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
        while True:
            is_new = self._process is None
            self._start()
            try:
                number = next(self._ids)
                request = {"id": number, "name": name, "seed": seed, "given": arguments}
                reply = self._ask(request, self._timeout)
                value, error = reply.get("value"), reply.get("error")
                usable = isinstance(value, float) or isinstance(error, str)
                if reply.get("id") != number or not usable:
                    raise ProcessEndedError("reply")
                break
            except ProcessEndedError as ended:
                self._close()
                # An earlier call may have broken an older process: try again in a new one.
                if is_new or ended.reason == "time":
                    limit = f"{self._timeout:g} s: make it faster, or raise --reward-timeout"
                    raise NoRewardError(_why(ended.reason, limit)) from None
        if isinstance(value, float):
            return value
        raise NoRewardError(error)

    def _ask(self, request: Any, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        sending = json.dumps(request, default=str).encode() + b"\n"
        line = self._process.read_line(_MAX_REPLY, sending=sending, seconds=seconds)
        with suppress(ValueError):
            reply = parse_json(line, RECORD_LIMITS, "a reply", constants=False)
            if isinstance(reply, dict):
                return {name: _valid(each) for name, each in reply.items()}
        raise ProcessEndedError("reply")

    def _show(self, message: bytes) -> None:
        """Pass on the first bytes that functions print, and a note on the rest."""
        if self._left > 0:
            print_answer(self._decoder.decode(message[: self._left]), stderr=True)
            self._left -= len(message)
            if self._left <= 0:
                note = f"reward functions print more than {_MAX_OUTPUT:,} bytes: not shown"
                print_answer(f"\n{note}\n", stderr=True)


def _import_function(spec: RewardSpec, content: bytes) -> tuple[str, str, str, str | None]:
    """Return the name, path, source and function of a reward for the process, as it documents."""
    if spec.file is None:
        return spec.name, spec.name, content.decode(), None
    # Latin-1 stands for bytes, as JSON has none.
    return spec.name, str(spec.file.absolute()), content.decode("latin-1"), spec.argument


def _valid(each: Any) -> Any:
    """Return a value of a reply; half a surrogate pair in text, which no file takes, is escaped."""
    return each.encode("utf-8", "backslashreplace").decode() if isinstance(each, str) else each


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _why(reason: str, time_limit: str) -> str:
    """Return the end of a sentence on a process that ended."""
    closed, wrote = "closed the pipe of its results", "wrote to the pipe of its results"
    reasons = {
        "time": f"took more than {time_limit}",
        "memory": f"took more than {byte_size(_MAX_MEMORY)} of memory",
        **{"length": wrote, "reply": wrote, "closed": closed},
        f"exit status {reward_helper.CLOSED}": closed,
    }
    return reasons.get(reason, f"ended its process with {reason}")
