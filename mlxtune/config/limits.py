"""Limits for each kind of file that is read, and a JSON parser that enforces them.

Python objects take up to 40 times the memory of their JSON: `[],` takes 3 bytes, and the list 64.
So the values are counted in the text before any object is created.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MB = 2**20


@dataclass(frozen=True)
class Limits:
    """Upper limits for one kind of file: its bytes, and the number and length of its values.

    `bytes` limits the length of the file, `values` the number of all values together, `entries` the
    length of an object, `items` the length of a list (by default `entries`), `text` the length of a
    string or name, `digits` the length of a number, and `depth` the nesting.
    """

    bytes: int
    values: int = 100_000
    entries: int = 50_000
    text: int = 100_000
    digits: int = 100
    items: int | None = None
    depth: int = 64


# Files of models, tokenizers and adapters, which are untrusted.
CONFIG_LIMITS = Limits(16 * _MB, values=500_000, entries=100_000, text=10_000)
# Each control token takes time at every load; the time for a list of tokens is quadratic in its
# length.
MAX_CONTROL_TOKENS = 50_000
TOKENIZER_CONFIG_LIMITS = Limits(
    32 * _MB, values=600_000, entries=MAX_CONTROL_TOKENS, text=4 * _MB, items=10_000
)
GENERATION_CONFIG_LIMITS = Limits(_MB)
ADAPTER_CONFIG_LIMITS = Limits(8 * _MB, values=200_000, entries=100_000, text=10_000)
INDEX_LIMITS = Limits(64 * _MB, values=2_000_000, entries=1_000_000, text=1000)
VOCABULARY_LIMITS = Limits(64 * _MB, values=3_000_000, entries=1_500_000, text=_MB)
# Loaded in a helper process whose memory is limited.
TOKENIZER_LIMITS = Limits(256 * _MB)
MERGES_LIMITS = Limits(32 * _MB)
TEMPLATE_LIMITS = Limits(4 * _MB)
OTHER_JSON_LIMITS = Limits(32 * _MB, values=500_000, entries=100_000, text=4 * _MB)
OTHER_LIMITS = Limits(64 * _MB)
# A Python file of the user.
CODE_LIMITS = Limits(4 * _MB)
# The header of a safetensors file: each tensor in it is an object with two lists of numbers.
HEADER_LIMITS = Limits(64 * _MB, values=3_000_000, entries=300_000, text=_MB, depth=4)
MAX_TENSOR_NAME_CHARS = 1000
OWN_JSON_LIMITS = Limits(64 * _MB, values=500_000, entries=200_000, text=8 * _MB)
# A group of sampled answers.
SAMPLE_LIMITS = Limits(256 * _MB, values=20_000_000, entries=10_000_000, text=16 * _MB)
# The most bytes to which the samples of a rollout unpack, and all samples that a report searches;
# the most steps that it shows, and the most bytes of a step's groups that it reads.
MAX_MEMBER_BYTES = MAX_SEARCHED_BYTES = 2**30
MAX_SHOWN_STEPS, MAX_SHOWN_BYTES = 12, 2 * _MB
# The reference's log-probabilities: one number per example.
REFERENCE_LIMITS = Limits(256 * _MB, values=10_000_000, entries=10_000_000)
MANIFEST_LIMITS = Limits(_MB, values=1000, entries=100, text=1000)
RECORD_LIMITS = Limits(_MB, values=20_000, entries=20_000)
OWN_FILE_LIMITS = Limits(256 * _MB)
# The maximum number of validations, epochs and skipped steps; other steps are kept as columns.
MAX_OTHER_RECORDS = 200_000
# The values of one step, of all other lines together, and of the metrics of all steps together. A
# preference run has about ten metrics a step.
MAX_STEP_VALUES, MAX_OTHER_VALUES, MAX_METRIC_VALUES = 100, 2_000_000, 3_000_000
HUB_RESPONSE_LIMITS = Limits(32 * _MB, values=1_000_000, entries=500_000, text=_MB)
# A config file: almost no limit on digits or nesting, because each option reports its own errors.
OPTIONS_LIMITS = Limits(64 * 1024, values=40_000, entries=20_000, digits=100_000, depth=200)

# Patterns of options. Compiling takes memory for each repetition, so counts have four digits.
_MAX_PATTERN_CHARS = 1000
_LONG_REPEAT = re.compile(r"\{[^}]*\d{5}")

_BY_NAME = {
    "config.json": CONFIG_LIMITS,
    "adapter_config.json": ADAPTER_CONFIG_LIMITS,
    "tokenizer_config.json": TOKENIZER_CONFIG_LIMITS,
    "generation_config.json": GENERATION_CONFIG_LIMITS,
    "special_tokens_map.json": TOKENIZER_CONFIG_LIMITS,
    "added_tokens.json": TOKENIZER_CONFIG_LIMITS,
    "vocab.json": VOCABULARY_LIMITS,
    "tokenizer.json": TOKENIZER_LIMITS,
    "tokenizer.model": TOKENIZER_LIMITS,
    "vocab.txt": VOCABULARY_LIMITS,
    "merges.txt": MERGES_LIMITS,
}
_BY_SUFFIX = {".json": OTHER_JSON_LIMITS, ".jinja": TEMPLATE_LIMITS}


def limits_of(name: str) -> Limits:
    """Return the limits of a file in a model's or an adapter's folder, by its name."""
    if name.endswith(".index.json"):
        return INDEX_LIMITS
    suffix = name[name.rfind(".") :] if "." in name else ""
    return _BY_NAME.get(name) or _BY_SUFFIX.get(suffix, OTHER_LIMITS)


class TooLargeError(ValueError):
    """A file, or a value in it, is larger than its kind may be."""


def check_bytes(name: str, size: int, limits: Limits) -> None:
    """Raise TooLargeError, naming the file, if it has more bytes than its kind may have."""
    if size > limits.bytes:
        raise TooLargeError(f"{name} is too large: {size:,} bytes, more than {limits.bytes:,}")


def parse_json(content: bytes, limits: Limits, name: str, *, constants: bool = True) -> Any:
    """Return the value of a file's JSON, after counting its values.

    Without `constants`, NaN, infinity and numbers as large as 1e999 are refused. Raises
    TooLargeError or another ValueError, which both name the file.
    """
    check_bytes(name, len(content), limits)
    check_count(content, limits, name)
    try:
        # `int` raises ValueError for the constants NaN and Infinity.
        kinds: dict[str, Any] = {} if constants else {"parse_constant": int, "parse_float": _finite}
        value = json.loads(content.decode("utf-8"), **kinds)
    except RecursionError as error:
        raise TooLargeError(f"{name} is nested too deep") from error
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON") from error
    check_value(value, limits, name)
    return value


def _finite(digits: str) -> float:
    if math.isfinite(number := float(digits)):
        return number
    raise ValueError(f"{digits:.40} is too large a number")


# Matches unterminated strings too, so that their text is not scanned again from each quote in it.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def has_more_values(content: bytes, most: int) -> bool:
    """Return whether JSON may have more than `most` values, counting brackets and commas."""
    # Skipping strings takes time, so first count the brackets and commas inside strings too.
    if len(content) <= most or _marks(content, 0, len(content)) <= most:
        return False
    values = end = 0
    for text in _STRING.finditer(content):
        values += _marks(content, end, text.start())
        if values > most:
            return True
        end = text.end()
    return values + _marks(content, end, len(content)) > most


def check_count(content: bytes, limits: Limits, name: str) -> None:
    """Raise TooLargeError, naming the file, if JSON has more values than its kind may have."""
    if has_more_values(content, limits.values):
        raise TooLargeError(f"{name} has more than {limits.values:,} values")


def _marks(content: bytes, start: int, end: int) -> int:
    return sum(content.count(mark, start, end) for mark in (b"[", b"{", b","))


def check_value(value: Any, limits: Limits, name: str) -> None:
    """Raise TooLargeError, naming the file, for text, lists, numbers or nesting beyond limits."""
    for each, depth in _walk(value):
        if isinstance(each, str):
            if len(each) > limits.text:
                raise TooLargeError(f"{name} has text of {len(each):,} characters: {each!r:.40}")
        elif isinstance(each, dict | list):
            most = limits.items if isinstance(each, list) and limits.items else limits.entries
            if len(each) > most:
                raise TooLargeError(
                    f"{name} has a list or object of {len(each):,} values, more than {most:,}"
                )
            if depth > limits.depth:
                raise TooLargeError(f"{name} is nested too deep")
        elif isinstance(each, int) and _is_longer(each, limits.digits):
            raise TooLargeError(f"{name} has a number of more than {limits.digits} digits")


def _is_longer(number: int, digits: int) -> bool:
    # Three bits hold less than a digit, so most numbers need no power of ten.
    return number.bit_length() > 3 * digits and abs(number) >= 10**digits


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield a value and all values in it, each with its depth; a list comes before its elements."""
    pending, seen = [(value, 1)], set()
    while pending:
        each, depth = pending.pop()
        yield each, depth
        # In YAML, a list may occur several times, even inside itself.
        if isinstance(each, dict | list):
            if id(each) in seen:
                continue
            seen.add(id(each))
        if isinstance(each, dict):
            pending += [(name, depth + 1) for name in each]
            pending += [(part, depth + 1) for part in each.values()]
        elif isinstance(each, list):
            pending += [(part, depth + 1) for part in each]


def check_pattern(pattern: str) -> None:
    """Raise ValueError, with the end of a sentence, for a pattern that `regex` must not compile."""
    # Import only for a pattern, because the import takes time.
    import regex

    try:
        if _LONG_REPEAT.search(pattern):
            raise ValueError("it repeats more than 9,999 times")
        regex.compile(pattern)
    except (regex.error, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is not a pattern: {error}") from error
    # The time limit of a search does not cover all its steps, so limit the pattern too.
    if not 0 < len(pattern) <= _MAX_PATTERN_CHARS:
        raise ValueError(f"must have a pattern of 1 to {_MAX_PATTERN_CHARS:,} characters")
