"""Problems in rows, with the place of each row, and the bytes of the files that have them.

A problem is a reason to skip a row, or a note on it.
"""

import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mlxtune.config import user_cache
from mlxtune.config.limits import has_more_values
from mlxtune.core.files.reading import open_regular, open_zipped
from mlxtune.core.formatting import pluralize
from mlxtune.errors import shorten

ANOTHER_ANSWER = "prompt that another row answers differently"
CLASS_LABEL = "label beside plain text, which is not learned"
CONTROL_TOKEN = "control token written in content"
DOUBLE_BOS = "BOS twice at the start"
DOUBTFUL_NULLS = "nulls in tools or arguments, kept as values"
DROPPED_CONTENT = "text beside a tool call left out by the template"
DROPPED_SYSTEM = "system message left out by the template"
DROPPED_TEXT = "text left out by the template"
DROPPED_THINKING = "thinking left out by the template"
DROPPED_TOOLS = "tools left out by the template"
DUPLICATE = "duplicate row"
EMPTY_PROMPT = "empty prompt"
EMPTY_VALUE = "answer that is an empty value of a table"
LEAK = "validation row that is also trained on"
LEAKED_PROMPT = "validation prompt that is also trained on"
MERGED_SYSTEM = "system message merged into the first user turn"
MOJIBAKE = "text decoded wrongly, such as Ã© for é"
NO_END_OF_TURN = "end-of-turn token unknown to the tokenizer"
NO_PROMPT = "assistant turn with no prompt before it"
RENDERED_CHAT = "text that is a rendered chat"
REFUSAL = "answer that refuses"
OPPOSITE = "pair that another row has the other way round"
REPLACED = "replacement character, where text was lost"
TWO_THOUGHTS = "thinking both in an answer's text and in its own field"
TRUNCATED_ANSWER = "answer cut at --max-seq-len"
TWO_PROMPTS = "answers whose prompts the template renders differently"
UNANSWERED = "last message that no answer follows"
UNCLOSED_THINKING = "thinking that is never closed"
UNKNOWN_END = "end of turn that is not among the model's end tokens"
FURTHER_KEYS = "further keys that are not read"
UNKNOWN_TAGS = "thinking in tags that the template does not write"
UNMATCHED_RESULT = "tool result that belongs to no call"
UNREAD_MARK = "key that is not read as a mark"
UNREAD_THINKING = "key that is not read as thinking"
UNREAD_OPTION = "option that the template does not read"
UNREAD_METADATA = "keys beside the conversation that are not read"
UNDECLARED_TOOL = "call of a tool that is not declared"

ADVICE = {
    ANOTHER_ANSWER: "the model learns a mix of the answers: keep one, unless several are intended",
    CLASS_LABEL: "the model learns the text alone: to learn the label as the answer to the text, "
    "use --field prompt=text --field completion=KEY",
    CONTROL_TOKEN: "the model reads it as a real control token: remove it from the text",
    DOUBLE_BOS: "the model's template writes it twice: fix the template",
    DOUBTFUL_NULLS: "the model sees them, as in transformers: if a table filled them in, convert "
    "it to parquet, from which they are left out",
    DROPPED_CONTENT: "it is not trained on: remove it, or split the turn in two",
    DROPPED_SYSTEM: "training and inference do not show it to the model: try --merge-system",
    DROPPED_TEXT: "training and inference do not show it to the model: remove it, or write it as "
    "the template keeps it",
    DROPPED_THINKING: "it is not trained on: use a template that writes it, without --thinking off",
    DROPPED_TOOLS: "training and inference do not show them: use a model that supports tools",
    DUPLICATE: "each copy is trained on: keep one, unless the copies are intended",
    EMPTY_PROMPT: "the answer is trained on without a question: fill it in, or remove the row",
    EMPTY_VALUE: "the model learns to write it: fill it in, or remove the row, unless intended",
    LEAK: "the validation loss looks better than it is: remove the row from one of the two sets",
    LEAKED_PROMPT: "validation results look better than they are: keep each prompt in only one set",
    MERGED_SYSTEM: "--merge-system did this: do the same at inference",
    MOJIBAKE: "the model learns to write it: read the source as UTF-8, and export it again",
    NO_END_OF_TURN: "it is trained on as plain text: mlxtune stops at it, but other tools do not",
    NO_PROMPT: "there is nothing to answer, so it is context and not trained on",
    OPPOSITE: "the two cancel out: remove the one whose answers are swapped",
    RENDERED_CHAT: "the model's own template writes markup: give 'messages', or 'prompt' and "
    "'completion', without any",
    REFUSAL: "the model learns to refuse: remove the row, unless that is intended",
    REPLACED: "the model learns to write it: export the text again, in UTF-8",
    TWO_THOUGHTS: "the model learns to write both: keep one",
    TRUNCATED_ANSWER: "the model learns neither the answer's end nor to stop: raise --max-seq-len",
    TWO_PROMPTS: "each answer keeps the prompt of inference, so the two share fewer tokens",
    UNANSWERED: "it is not used: add its answer if there is one",
    UNCLOSED_THINKING: "the model learns to answer within its thinking: write </think> after it",
    UNKNOWN_END: "mlxtune stops at it, but other tools write on: give them the token, or run "
    "mlxtune fuse, which adds it to the model's end tokens",
    FURTHER_KEYS: "the model does not see it: put what it holds into the messages, or remove it",
    UNKNOWN_TAGS: "the model learns them as plain text: move the thinking to reasoning_content in "
    "the answer's message",
    UNMATCHED_RESULT: "the model reads it as the result of the calls before it: correct its "
    "tool_call_id, or remove it",
    UNREAD_MARK: 'it has no effect here: write "weight": 0 on the message that is not learned',
    UNREAD_THINKING: "the model does not see it: rename it to reasoning_content in the answer's "
    "message, or remove it",
    UNREAD_OPTION: "it changes nothing here: remove it, or use a template that has it",
    UNREAD_METADATA: "no model sees what they hold",
    UNDECLARED_TOOL: "the model learns to invent tools: add the tool to the row's tools",
}
UTF8_BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
GZIP, PARQUET, ZIP = b"\x1f\x8b", b"PAR1", b"PK\x03\x04"
TABLE_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_HEAD_BYTES = 8192
# The first end of a line outside quotation marks; some tools write CR CR LF.
_LINE_END = re.compile(r'(?:[^"\r\n]|"[^"]*")*(\r+\n|\n|\r)')
# The last line of a table whose record messages name, and the longest line to count at once.
_MAX_LINE_NUMBER, _MAX_COUNTED_SIZE = 100_000, 2**26
# The maximum number of JSON values in a row. Values take some 20 times the memory of their text.
_MAX_VALUES = 4_000_000
# The most warnings about rows that are skipped for one reason.
_MAX_WARNINGS = 2
# Reasons to skip a row that its marks ask for.
MARK_REASONS = {
    "row": "a row that is marked not to be learned",
    "turns": "no assistant turn with weight 1",
    "last turn": "the last assistant turn has weight 0",
}
# Kinds of notes for which `train` refuses the data, and kinds that need no attention.
ERRORS = (DOUBLE_BOS,)
REMARKS = (ANOTHER_ANSWER, DOUBTFUL_NULLS, UNANSWERED, UNREAD_METADATA)
# The ends of the kinds of notes on keys, each with the kind that has its advice.
_UNREAD_KINDS = {
    " of the template's options is not read": UNREAD_OPTION,
    " is not read": FURTHER_KEYS,
    " is not read as a mark": UNREAD_MARK,
    " is not read as thinking": UNREAD_THINKING,
}
_ENDS = tuple(_UNREAD_KINDS)
# The most keys that get a finding of their own in a file.
_MAX_KEYS = 32


def unread_key(level: str, key: str, holds: str = "") -> str:
    """Return the kind of note on a key that is not read.

    `level` is the object that has the key; `holds` is "a mark" or "thinking" if its name says so.
    """
    return f"key {shorten(key)} of {level} is not read" + f" as {holds}" * bool(holds)


def bounded(kind: str, kinds: Collection[str]) -> str:
    """Return a kind of note, or a common kind for further keys, so that kinds stay few."""
    if kind in kinds or not kind.endswith(_ENDS):
        return kind
    return kind if sum(each.endswith(_ENDS) for each in kinds) < _MAX_KEYS else FURTHER_KEYS


def advice_on(kind: str) -> str:
    """Return the advice on a kind of note."""
    return ADVICE[
        next((unread for end, unread in _UNREAD_KINDS.items() if kind.endswith(end)), kind)
    ]


class BadRowError(ValueError):
    """A row that cannot be trained on.

    `kind` is the reason under which rows with this problem are counted; `detail` adds the place in
    the row, or a remedy.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind = kind
        self.detail = detail


@dataclass(kw_only=True)
class RowTally:
    """The number of rows of a file by kind, and (row, detail) for the first few of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    places_per_kind: int = 5

    def count(self, row: int, kind: str, detail: str = "") -> None:
        self.counts[kind] += 1
        sources = self.places.setdefault(kind, [])
        if len(sources) < self.places_per_kind:
            sources.append((row, detail))


@dataclass
class SkippedRows(RowTally):
    """The rows of one file that were skipped, by reason.

    `absent` has the fields whose key no row of the file has, skipped or not, and `unanswered` the
    numbers of the rows that need no answer and have none.
    """

    path: Path
    absent: dict[str, str] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)

    def add(self, row: int, problem: BadRowError) -> None:
        self.count(row, problem.kind, problem.detail)

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def problems(self) -> dict[int, BadRowError]:
        """The problems of the first few rows skipped for each reason, by row number."""
        return {
            row: BadRowError(kind, detail)
            for kind in self.places
            for row, detail in self.places[kind]
        }

    def warnings(self) -> Iterator[str]:
        """Yield `path:line: reason` for a few rows of each reason, then how many more there are."""
        for kind, every in self.places.items():
            first = every[:_MAX_WARNINGS]
            for row, detail in first:
                yield f"{where(self.path, row)}: {BadRowError(kind, detail)}; row skipped"
            if (more := self.counts[kind] - len(first)) > 0:
                yield f"{path_text(self.path)}: {pluralize(more, 'more row')} skipped: {kind}"

    def first(self) -> str:
        """Return `path:line: reason` for the first row that was skipped."""
        row, problem = min(self.problems.items())
        return f"{where(self.path, row)}: {problem}"


def check_value_count(text: bytes) -> None:
    """Raise BadRowError for JSON with too many values, which take far more memory than text."""
    if len(text) > _MAX_VALUES and has_more_values(text, _MAX_VALUES):
        raise BadRowError(f"holds more than {_MAX_VALUES:,} values")


def parse_row_json(
    text: str | bytes, kind: str = "not valid JSON", *, has_constants: bool = True
) -> Any:
    """Return the value of JSON, as text or UTF-8. Raises BadRowError, of `kind` for bad syntax.

    NaN and Infinity, which Python and tables write, are refused unless `has_constants`.
    """
    try:
        if isinstance(text, bytes):
            check_value_count(text)
            text = text.decode("utf-8")
        return (_DECODER if has_constants else _STRICT_DECODER).decode(text)
    except BadRowError:
        raise
    except UnicodeDecodeError as error:
        raise BadRowError("not UTF-8", f"byte {error.start + 1}: save the file in UTF-8") from error
    except json.JSONDecodeError as error:
        raise BadRowError(kind, _syntax_error(error)) from error
    except RecursionError as error:
        raise BadRowError("JSON nested too deeply") from error
    except ValueError as error:
        digits = f"{sys.get_int_max_str_digits():,} digits"
        raise BadRowError(f"a number of more than {digits}", "write it as text") from error


def _syntax_error(error: json.JSONDecodeError) -> str:
    """Return the kind and position of a JSON error; names syntax of Python or JavaScript."""
    text, at, problem = error.doc, error.pos, error.msg.removesuffix(" at")
    rest, before = text[at:].lstrip(), text[:at].rstrip()
    # From Python 3.13 on, the error is at the comma; before, it is at the bracket.
    comma = at if rest.startswith(",") else len(before) - 1 if before.endswith(",") else -1
    after = text[comma + 1 :].lstrip()[:1]
    if comma >= 0 and after in ("]", "}"):
        at, problem = comma, f"trailing comma before '{after}'"
    elif comma == at and not after:
        problem = "comma after the end"
    elif rest.startswith("'"):
        at, problem = len(text) - len(rest), "single quotes instead of double quotes"
    elif constant := re.match(r"(?:True|False|None)\b", rest):
        right = {"None": "null"}.get(constant[0], constant[0].lower())
        at, problem = len(text) - len(rest), f"Python's {constant[0]} instead of {right}"
    lines = text.count("\n", 0, at)
    line = f"line {lines + 1}, " if lines else ""
    return f"{problem} at {line}column {at - text.rfind(chr(10), 0, at)}"


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise BadRowError("a key twice in one object", f"{shorten(twice)}: keep one")
    return values


def _refuse_constant(name: str) -> None:
    raise BadRowError(f"{name} in JSON text", "write null or text")


_DECODER = json.JSONDecoder(object_pairs_hook=_keys_once)
_STRICT_DECODER = json.JSONDecoder(object_pairs_hook=_keys_once, parse_constant=_refuse_constant)


def json_text(value: Any) -> str:
    """Return the JSON of a value from a row for a message, at most 60 characters of it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return json_type(value)
    return text if len(text) <= 60 and text.isprintable() else shorten(text)


def json_type(value: Any) -> str:
    """Return the type of a JSON value in words, such as "a list"."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


# Places: a line of a file, or an element of an array


def rows_folder() -> Path:
    """Return the folder whose files, such as `data-HASH.jsonl`, hold rows passed from Python."""
    return user_cache() / "rows"


def path_text(path: str | Path) -> str:
    """Return a file's path for messages; for rows passed from Python, their argument's name."""
    file = Path(path)
    return file.name.partition("-")[0] if file.parent == rows_folder() else str(path)


def where(path: str | Path, row: int, name: str = "") -> str:
    """Return `path:26` for a line, `path[26]` for an element; both count from 1.

    For a line of a table with values of several lines, add the record, as spreadsheets count it.
    `name` is the file's name, if it is not its path.
    """
    file = path_text(path)
    try:
        head = b"[" if file != str(path) else read_head(Path(path))
    except (OSError, ValueError, EOFError, zlib.error):
        head = b""
    name = name or file
    if has_elements(head):
        return f"{name}[{row}]"
    record = _record_number(Path(path), row) if file.lower().endswith(TABLE_ENDINGS) else None
    return f"{name}:{row}" + ("" if record is None else f" (record {record})")


def _record_number(path: Path, row: int) -> int | None:
    """Return the record of a table that starts at a line; None if it is one less than the line.

    The column names are not a record. The end of a line is in a quoted value after an odd number of
    quotation marks.
    """
    record, quotes = 0, 0
    with suppress(OSError, EOFError, zlib.error):
        if row > _MAX_LINE_NUMBER or uses_carriage_returns(read_head(path)):
            return None
    with suppress(OSError, EOFError, zlib.error), open_data(path) as file:
        for _ in range(row - 1):
            line = file.readline(_MAX_COUNTED_SIZE)
            quotes += line.count(b'"')
            record += quotes % 2 == 0 and bool(line.strip())
    return None if record == row - 1 else record


def has_elements(head: bytes) -> bool:
    """Return whether a file with these first bytes is parquet, an archive or a JSON array."""
    return head.startswith((PARQUET, ZIP)) or head.removeprefix(UTF8_BOM).lstrip().startswith(b"[")


def uses_carriage_returns(head: bytes) -> bool:
    """Return whether the lines of a table with these first bytes end in CR.

    Excel's CSV for the Macintosh has such lines, and LF within cells.
    """
    end = _LINE_END.match(head.decode("utf-16" if head[:2] in UTF16 else "latin-1", "ignore"))
    return end is not None and end[1] == "\r"


def is_zipped(path: Path) -> bool:
    """Return whether a file is gzipped. Raises OSError."""
    with open_regular(path) as file:
        return file.read(len(GZIP)) == GZIP


def open_data(path: Path) -> IO[bytes]:
    """Open a data file, unzipped if it is gzipped. Raises OSError."""
    return open_zipped(path) if is_zipped(path) else open_regular(path)


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, unzipped. Raises the errors of opening and unzipping."""
    with open_data(path) as file:
        return file.read(_HEAD_BYTES)
