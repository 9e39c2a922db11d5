"""Data files to conversations: every row is kept, or skipped for a reason that is counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxtune.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
_UTF8_BOM = b"\xef\xbb\xbf"
_SHOWN = 60
_TOO_DEEP = "JSON nested too deeply"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `tool_calls` holds an assistant's calls as JSON objects, in OpenAI's layout."""

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row; `row` is its 1-based line number."""

    row: int
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


class BadRow(ValueError):
    """A row that cannot be trained on: `kind` is what is counted, `detail` says where."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind = kind


@dataclass
class SkippedRows:
    """The rows of one file that were skipped: counts by kind, and the first few of each."""

    path: Path
    counts: Counter[str] = field(default_factory=Counter)
    shown: dict[str, list[tuple[int, BadRow]]] = field(default_factory=dict)
    shown_per_kind: int = 5

    def add(self, row: int, problem: BadRow) -> None:
        """Count a row of the given 1-based line number."""
        self.counts[problem.kind] += 1
        shown = self.shown.setdefault(problem.kind, [])
        if len(shown) < self.shown_per_kind:
            shown.append((row, problem))

    @property
    def total(self) -> int:
        """How many rows were skipped."""
        return self.counts.total()

    def warnings(self) -> Iterator[str]:
        """Yield `path:line: reason` for the first rows of each kind, then how many more."""
        for kind, shown in self.shown.items():
            for row, problem in shown:
                yield f"{self.path}:{row}: {problem}; row skipped"
            if (more := self.counts[kind] - len(shown)) > 0:
                yield f"{self.path}: {more} more rows skipped: {kind}"

    def first(self) -> str:
        """Return `path:line: reason` of the first row that was skipped."""
        row, problem = min((shown[0] for shown in self.shown.values()), key=lambda pair: pair[0])
        return f"{self.path}:{row}: {problem}"


def read_conversations(path: Path, skipped: SkippedRows) -> Iterator[Conversation]:
    """Yield the conversation of each good row and add the others to `skipped`.

    A row is a line that is neither blank nor a comment (`#` first). Lines may be of any length and
    end in LF or CRLF; a UTF-8 byte order mark is dropped.

    Raises DataError when the file cannot be read or is not text.
    """
    check_data_file(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(_UTF8_BOM) if number == 1 else line
                content = content.strip()
                if not content or content.startswith(b"#"):
                    continue
                try:
                    yield parse_row(content, number)
                except BadRow as problem:
                    skipped.add(number, problem)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def check_data_file(path: Path, option: str = "--data") -> None:
    """Raise DataError unless the path is a file that can be read and looks like JSON lines.

    `option` is what named it.
    """
    try:
        with path.open("rb") as file:
            head = file.read(8192)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file: check {option}") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder: name a .jsonl file in it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise DataError(f"{path}: is empty: it needs one JSON object a line")
    if b"\0" in head or head.startswith(b"\x1f\x8b"):
        raise DataError(f"{path}: is a binary file: save it as JSON lines in UTF-8")
    if head.removeprefix(_UTF8_BOM).lstrip().startswith(b"["):
        raise DataError(f"{path}: is a JSON array: write one JSON object a line instead")


def parse_row(line: bytes, row: int) -> Conversation:
    """Parse one line of `{"messages": [...]}`.

    Raises BadRow, whose kind is the same for all rows with the same problem.
    """
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise BadRow("not valid JSON", f"{error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise BadRow(_TOO_DEEP) from error
    except ValueError as error:  # a number of thousands of digits
        raise BadRow("not valid JSON", str(error)) from error
    if not isinstance(content, dict):
        raise BadRow("not a JSON object", _kind_of(content))
    if "messages" not in content:
        names = ", ".join(map(_shorten, list(content)[:5])) or "none"
        raise BadRow("no 'messages'", f"its keys: {names}")
    messages, tools = parse_messages(content["messages"]), _objects(content, "tools")
    # Half a pair can only come from an escape, which few rows have.
    if b"\\u" in line:
        _check_surrogates(tools, "tools")
        for i, message in enumerate(messages, start=1):
            _check_surrogates((message.content, message.tool_calls), f"message {i}")
    return Conversation(row, messages, tools)


def parse_messages(messages: Any) -> tuple[Message, ...]:
    """Check and convert the messages of a row.

    Raises BadRow, also when no message is an assistant's, since nothing could be learned.
    """
    if not isinstance(messages, list):
        raise BadRow("'messages' is not a list", _kind_of(messages))
    parsed = tuple(_parse_message(i, message) for i, message in enumerate(messages, start=1))
    if not any(message.role == "assistant" for message in parsed):
        raise BadRow("no assistant turn")
    return parsed


def _parse_message(position: int, message: Any) -> Message:
    where = f"message {position}"
    if not isinstance(message, dict):
        raise BadRow("a message is not an object", f"{where} is {_kind_of(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadRow("a message has no role", where)
    if role not in ROLES:
        raise BadRow("unknown role", f"{where}: {_shorten(role)}; known: {', '.join(ROLES)}")
    calls = _objects(message, "tool_calls") if role == "assistant" else ()
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRow("content is not text", f"{where} is {_kind_of(content)}")
    if role == "assistant" and not content.strip() and not calls:
        raise BadRow("empty answer", where)
    return Message(role, content, calls)


def _check_surrogates(value: Any, where: str) -> None:
    try:
        to_json(value).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("text holds half a surrogate pair", where) from error


def to_json(value: Any) -> str:
    """Return JSON as the models' templates write it. Raises BadRow when it is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise BadRow(_TOO_DEEP) from error


def _objects(container: dict[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    value = container.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRow(f"'{key}' is not a list of objects")
    return tuple(value)


def _kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")


def _shorten(text: str) -> str:
    """Quote text from a file for a message: bounded, and with control characters escaped."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
