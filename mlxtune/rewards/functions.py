"""Rewards: a user's function in a Python file, or a built-in comparison with the row's answer.

reward                 1 if the answer, without its thinking and outer spaces, …
exact                  is the row's answer
contains               contains the row's answer
number, number:0.01    ends with the row's number: their last numbers are equal, or that near
json                   is JSON with the same values as the row's answer
json:SCHEMA.json       is JSON that a schema allows
json_keys              is a JSON object with the keys of the row's answer, and no others, whose
                       values are the same; otherwise, the fraction of keys that are right
length, length:200     has at most as many characters as the row's answer, or at most 200; a longer
                       answer gets the quotient of the two numbers, an empty one 0
regex=PATTERN          matches anywhere, thinking included; if the pattern has a group, the group
                       must also find what it finds in the row's answer
"""

import ast
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from mlxtune.config.fields import as_path
from mlxtune.config.limits import (
    CODE_LIMITS,
    CONFIG_LIMITS,
    RECORD_LIMITS,
    Limits,
    check_pattern,
    parse_json,
)
from mlxtune.config.objective_config import NUMBER, parse_reward
from mlxtune.core.evaluation.matching import canonical
from mlxtune.core.files.reading import read_bytes
from mlxtune.core.machine.installation import installs_extra
from mlxtune.errors import ConfigError, one_line, shorten
from mlxtune.rewards.reward_helper import USUAL

_THINKING_ENDS, _THINKING_STARTS = "</think>", "<think>"
_SEARCH_SECONDS = 0.5
# Numbers are equal if they differ by this fraction of the larger.
_PRECISION = 1e-6
INVALID = object()

# The longest name of a reward that is looked up.
_MAX_NAME = 60
# What a number after the colon of a built-in reward is, and weights that look like one.
_COLON_SETS = {"number": "the tolerance", "length": "the number of characters"}
_EXAMPLES = {"number": "0.01", "length": "200"}
_LIKE_A_TOLERANCE, _LIKE_A_LENGTH = 0.01, 10

# Returns the reward of an answer, given the row's answer.
Score = Callable[[str, str | None], float]


class NoRewardError(Exception):
    """A reward has no value for an answer; the message says why."""


@dataclass(frozen=True)
class RewardSpec:
    """A reward by its name, with its weight in the sum.

    `kind` is `function` or the name of a built-in reward. `argument` is what follows the name: the
    name of the function in `file`, a pattern, a tolerance, a schema's file or a length. `content`
    is the text of the Python file or the schema, which is read once, so that all uses agree.
    `modules` has the path and the text of each module of the file's folder that it imports. Rewards
    with a `content` may take any time, so they run in the helper process only.
    """

    kind: str
    argument: str = ""
    weight: float = 1.0
    file: Path | None = None
    content: bytes | None = field(default=None, repr=False)
    modules: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `FILE.py[:FUNCTION]` or a built-in reward, with an optional `=WEIGHT`.

        A number after the last `=` is the weight, so a pattern that ends in `=` and a number needs
        a weight after it. The file is read. Raises ConfigError.
        """
        try:
            return cls._parse(text)
        except ConfigError:
            raise
        except ValueError as problem:
            raise ConfigError([f"reward {shorten(text)} {problem}"]) from problem

    @classmethod
    def _parse(cls, text: str) -> Self:
        parts = parse_reward(text)
        kind, argument, weight = parts.kind, parts.argument, parts.weight
        if not math.isfinite(weight):
            raise ValueError(f"has the weight {weight}: give a finite number")
        if parts.is_code:
            file = as_path(parts.file)
            content, function = _read(file, CODE_LIMITS), argument or USUAL
            return cls(kind, function, weight, file, content, _modules_beside(file, content))
        if kind not in _BUILT_IN:
            remedy = f"name a FILE.py, FILE.py:FUNCTION or {_KNOWN}"
            raise ValueError(f"is unknown{_suggestion(kind, argument)}: {remedy}")
        if parts.file:
            schema = _read(as_path(parts.file), CONFIG_LIMITS)
            _check_schema(schema)
            return cls(kind, argument, weight, content=schema)
        spec = cls(kind, argument, weight)
        spec.built_in()
        return spec

    @property
    def hint(self) -> str:
        """A warning of a weight that looks like a tolerance or a length; empty for others."""
        weight, meaning = abs(self.weight), _COLON_SETS.get(self.kind)
        is_weight = weight == 0 or _LIKE_A_TOLERANCE < weight < _LIKE_A_LENGTH
        if self.argument or meaning is None or is_weight:
            return ""
        number = f"{self.weight:g}"
        return (
            f"reward {self.kind}={number} has the weight {number}: if it is {meaning}, write "
            f"{self.kind}:{number}"
        )

    @property
    def name(self) -> str:
        """The reward's name in tables and records: `check.reward` for a function of check.py."""
        if self.file is not None:
            return f"{self.file.stem}.{self.argument}"
        separator = "=" if self.kind == "regex" else ":"
        # The folder of a schema may change.
        argument = as_path(self.argument).name if self.kind == "json" else self.argument
        return f"{self.kind}{separator}{argument}" if argument else self.kind

    def built_in(self) -> Score:
        """Return the function of a built-in reward, which takes a limited time for any answer.

        Raises ValueError for a bad argument.
        """
        if (made := _MAKERS.get(self.kind)) is not None:
            return made(self.argument)
        if self.argument:
            raise ValueError(f"has an argument, which {self.kind} does not take: leave it out")
        compare = _COMPARISONS[self.kind]
        return lambda text, answer: compare(without_thinking(text), _required(answer))


def _suggestion(kind: str, argument: str) -> str:
    """Return a question about what an unknown reward may mean: a file here, or a similar name."""
    file = as_path(f"{kind}.py") if kind and len(kind) < _MAX_NAME and "\0" not in kind else None
    if file is not None and file.is_file():
        return f" (did you mean {file}{f':{argument}' * bool(argument)}?)"
    close = difflib.get_close_matches(kind[:_MAX_NAME], _BUILT_IN, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _read(file: Path, limits: Limits) -> bytes:
    """Return the content of a reward's file. Raises ConfigError."""
    try:
        return read_bytes(file, limits)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError([f"reward {file} cannot be read: {why}: check its path"]) from error


def _modules_beside(file: Path, content: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return the path and the text of the modules in a file's folder that its imports reach.

    Only import statements count, not imports by a computed name. Raises ConfigError.
    """
    modules, left = dict[Path, bytes](), [(file, content)]
    while left:
        path, source = left.pop()
        for each in _imports(path, source, file.parent):
            if each != file and each not in modules and each.is_file():
                modules[each] = _read(each, CODE_LIMITS)
                left.append((each, modules[each]))
    named = ((str(path.relative_to(file.parent)), text) for path, text in modules.items())
    return tuple(sorted(named))


def _imports(path: Path, source: bytes, folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that the import statements of a file may name."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # importing it fails too
        return
    for node in nodes:
        start, names = folder, list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A level too many, which importing refuses, ends at the root.
            start = [folder, path.parent, *path.parent.parents][: node.level + 1][-1]
            names = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
        for name in names:
            parts = name.split(".")
            # The installed ones come first.
            if start == folder and parts[0] in sys.stdlib_module_names:
                continue
            for count in range(1, len(parts) + 1):
                module = start.joinpath(*parts[:count])
                if module.is_relative_to(folder):
                    yield from (module.with_name(f"{module.name}.py"), module / "__init__.py")


def parse_rewards(texts: Iterable[str]) -> tuple[RewardSpec, ...]:
    """Parse several rewards. Raises ConfigError, which lists every problem.

    One of them must have a weight, or all answers would be equal.
    """
    specs: list[RewardSpec] = []
    problems: list[str] = []
    for text in texts:
        try:
            specs.append(RewardSpec.parse(text))
        except ConfigError as error:
            problems += error.problems
    if specs and not problems and not any(spec.weight for spec in specs):
        problems = ["every reward has the weight 0, so no answer is better: give one a weight"]
    if problems:
        raise ConfigError(problems)
    return tuple(specs)


def without_thinking(text: str) -> str:
    """Return an answer after its thinking, stripped; thinking that never ends has no answer."""
    answer = text.rpartition(_THINKING_ENDS)[2]
    return answer.partition(_THINKING_STARTS)[0].strip()


# Built-in rewards


def _exact(text: str, answer: str) -> float:
    return float(text == answer)


def _contains(text: str, answer: str) -> float:
    return float(answer in text)


def _regex(pattern: str) -> Score:
    if not pattern:
        raise ValueError(
            "has no pattern: write regex=PATTERN, and a weight after a pattern that ends in = and "
            "a number, as regex=a=5=1"
        )
    check_pattern(pattern)

    def score(text: str, answer: str | None) -> float:
        match = _search(pattern, text)
        if match is None or not match.re.groups:
            return float(match is not None)
        expected = _search(pattern, _required(answer))
        if expected is None:
            raise NoRewardError("the pattern finds nothing in the row's answer")
        return float(match[1] == expected[1])

    return score


def _search(pattern: str, text: str) -> Any:
    # Import only for a pattern, because the import takes time.
    import regex

    try:
        return regex.search(pattern, text, timeout=_SEARCH_SECONDS)
    except TimeoutError:
        raise NoRewardError(f"a search takes more than {_SEARCH_SECONDS:g} s") from None


def _length(argument: str) -> Score:
    most = _number_argument("length", argument) if argument else None
    if most is not None and most < 1:
        raise ValueError("needs a length of at least 1")

    def score(text: str, answer: str | None) -> float:
        limit = len(_required(answer)) if most is None else most
        return min(1.0, limit / length) if (length := len(without_thinking(text))) else 0.0

    return score


def _number(argument: str) -> Score:
    tolerance = _number_argument("number", argument) if argument else 0.0

    def score(text: str, answer: str | None) -> float:
        expected = last_number(_required(answer))
        if expected is None:
            raise NoRewardError("the row's answer has no number")
        number = last_number(without_thinking(text))
        return float(number is not None and number.equals(expected, tolerance))

    return score


def _number_argument(kind: str, argument: str) -> float:
    meaning, example = _COLON_SETS[kind], f"such as {kind}:{_EXAMPLES[kind]}"
    if not NUMBER.fullmatch(argument) or not math.isfinite(number := float(argument)):
        raise ValueError(f"must have {meaning} after the colon, {example}")
    if number < 0:
        raise ValueError(f"has a negative number: {meaning} must not be negative, {example}")
    return number


def _required(answer: str | None) -> str:
    expected = without_thinking(answer or "")
    if not expected:
        raise NoRewardError("the row has no answer to compare with")
    return expected


# JSON


def json_value(text: str) -> Any:
    """Return the value of JSON in the strict sense, without NaN; INVALID for other texts."""
    with suppress(ValueError):
        return parse_json(text.encode(), RECORD_LIMITS, "the answer", constants=False)
    return INVALID


def _json(text: str, answer: str) -> float:
    value, expected = json_value(text), json_value(answer)
    if expected is INVALID:
        raise NoRewardError("the row's answer is not JSON")
    return float(value is not INVALID and canonical(value) == canonical(expected))


def _json_keys(text: str, answer: str) -> float:
    values, expected = json_value(text), json_value(answer)
    if not isinstance(expected, dict) or not expected:
        raise NoRewardError("the row's answer is not a JSON object with keys")
    if not isinstance(values, dict):
        return 0.0
    shared = expected.keys() & values.keys()
    right = sum(canonical(values[key]) == canonical(expected[key]) for key in shared)
    return right / len(expected.keys() | values.keys())


def _check_schema(content: bytes) -> None:
    """Raise ValueError for a JSON schema that the helper cannot apply."""
    # Import only for a schema, because the package is optional.
    try:
        from jsonschema import Draft202012Validator, SchemaError, validators
    except ImportError as error:
        raise ValueError(f"needs jsonschema: {installs_extra('schema')}") from error
    schema = parse_json(content, CONFIG_LIMITS, "the schema")
    try:
        validators.validator_for(schema, Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"names a wrong JSON schema: {one_line(error.message)}") from error


# Numbers

# 1,234.5, 1 234,5, 1'234 and 1_234; 1.234,5 and 1.234.567; 1.5, 1,5, 15 and .5
_DIGITS = (
    r"(?:[1-9]\d{0,2}(?P<separator>[, \u00a0\u2009\u202f'’_])\d{3}(?:(?P=separator)\d{3})*"
    r"(?:(?!(?P=separator))[.,]\d+)?(?!\d)"
    r"|(?P<dotted>[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,})(?!\d))|\d+[.,]\d+|\d+|\.\d+)"
)
_POWER = r"\s?(?:[×x*]|\\times|\\cdot)\s?10(?:\^|\*\*)\{?(?P<power>[-+−]?\d{1,4})\}?"
_NUMBER = re.compile(
    # Not the digits of a word such as CO2, except after the code of a currency.
    r"(?:(?<![^\W_])|(?<=\b[A-Z]{3}))"
    # The minus of -3, -$3 and $-3, but not of 7-3.
    r"(?P<sign>(?<![\w)\]])[-−–+][$€£¥₹]?)?"
    rf"(?:\\[dt]?frac\{{(?P<top>\d{{1,30}})\}}\{{(?P<bottom>\d{{1,30}})\}}"
    rf"|(?P<date>(?<=/))?(?:(?P<whole>\d{{1,30}}) (?=\d+/\d))?(?P<digits>{_DIGITS})"
    # 3/4, but not the 3/4 of 3/4/2024
    rf"(?:[eE](?P<exponent>[-+]?\d{{1,4}})(?!\w)|{_POWER}|(?(date)(?!)|/(?P<over>\d{{1,30}})(?![\d/])))?)"
    r"\s?(?P<percent>\\?%)?"
)


class Number(NamedTuple):
    """A number in a text, and whether a percent sign follows it."""

    value: float
    percent: bool

    def equals(self, other: Self, tolerance: float) -> bool:
        """Return whether the numbers differ by at most a tolerance.

        If only one of them has a percent sign, 12% equals both 12 and 0.12.
        """
        pairs = [(self.value, other.value)]
        if self.percent != other.percent:
            one, two = (each.value / (100 if each.percent else 1) for each in (self, other))
            pairs.append((one, two))
        return any(math.isclose(*pair, rel_tol=_PRECISION, abs_tol=tolerance) for pair in pairs)


def last_number(text: str) -> Number | None:
    """Return the last finite number in a text."""
    number = (Number(_value(match), bool(match["percent"])) for match in _NUMBER.finditer(text))
    return next((each for each in reversed([*number]) if math.isfinite(each.value)), None)


def _value(match: re.Match[str]) -> float:
    top, bottom = match["top"] or match["digits"], match["bottom"] or match["over"] or "1"
    separator = "." if match["dotted"] else match["separator"] or ""
    power = (match["exponent"] or match["power"] or "0").replace("−", "-")
    value = float(f"{top.replace(separator, '').replace(',', '.')}e{power}")
    value = float(match["whole"] or 0) + (value / float(bottom) if float(bottom) else math.nan)
    return -value if (match["sign"] or "+")[0] in "-−–" else value


# Compare an answer without its thinking with the row's, which is required.
_COMPARISONS = {"exact": _exact, "contains": _contains, "json": _json, "json_keys": _json_keys}
_MAKERS = {"regex": _regex, "number": _number, "length": _length}
_BUILT_IN = (*_COMPARISONS, *_MAKERS)
_KNOWN = "exact, contains, regex=PATTERN, number, json, json_keys or length"
