"""Compares answers with the expected answers, and counts those that match."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mlxtune.config.limits import RECORD_LIMITS, parse_json
from mlxtune.core.evaluation.outcome import ExactMatch, KeyMatches, Matches, Sample
from mlxtune.errors import shorten

# Time limit of a pattern search in seconds, and the number of searches that may exceed the limit.
_SEARCH_SECONDS, _MAX_SLOW_SEARCHES = 0.5, 8
# The maximum number of keys that are counted: others would come from damaged data.
_MAX_KEYS = 100
_INVALID = object()

Same = Callable[[str, str], bool]


def matcher(by: str, warn: Callable[[str], None] = lambda problem: None) -> Same:
    """Return a function that compares an answer with the expected answer.

    The answers match by `json` if both are JSON with equal values, by `contains` if the answer
    contains the expected answer, and by `regex=PATTERN` if the pattern, or its first group, finds
    the same text in both. After several timeouts, searching stops. `warn` is called at the first
    timeout and when searching stops. Raises regex.error.
    """
    if by == "json":
        return _is_same_json
    if by == "contains":
        return lambda answer, expected: expected.strip() in answer
    # Python's `re` has no timeout.
    import regex

    pattern, slow = regex.compile(by.removeprefix("regex=")), 0

    def find(text: str) -> str | None:
        nonlocal slow
        if slow == _MAX_SLOW_SEARCHES:
            return None
        try:
            hit = pattern.search(text, timeout=_SEARCH_SECONDS)
        except TimeoutError:
            if not slow:
                warn(f"--match {shorten(by)} takes too long on some answers, which count as wrong")
            slow += 1
            if slow == _MAX_SLOW_SEARCHES:
                warn(f"--match {shorten(by)}: the remaining answers are not searched")
            return None
        value: str | None = None if hit is None else hit[min(pattern.groups, 1)]
        return value

    return lambda answer, expected: (hit := find(answer)) is not None and hit == find(expected)


def count_exact(samples: Sequence[Sample]) -> ExactMatch:
    """Count the answers that equal the expected ones."""
    return ExactMatch(*_counts(samples, str.__eq__))


def count_matches(samples: Sequence[Sample], by: str, same: Same) -> Matches:
    """Count the answers that match; by json, also the right values of each key, and invalid JSON.

    `same` compares the base model's answers; the samples say which of the others are right.
    """
    adapted = _is_adapted(samples)
    right = sum(sample.right is True for sample in samples)
    base = sum(same(sample.base, sample.expected) for sample in samples) if adapted else right
    against = [sample.against_right for sample in samples if sample.against_right is not None]
    counts = (base, right if adapted else None, sum(against) if against else None)
    if by != "json":
        return Matches(by, *counts)
    invalid = ExactMatch(*_counts(samples, lambda answer, _: _json(answer) is _INVALID))
    return Matches(by, *counts, keys=_keys(samples), invalid=invalid)


def _is_adapted(samples: Sequence[Sample]) -> bool:
    return any(sample.adapted is not None for sample in samples)


def _counts(samples: Sequence[Sample], holds: Same) -> tuple[int, int | None, int | None]:
    """Count the samples for which `holds` is true of a model's answer and the expected one."""

    def count(name: str) -> int | None:
        pairs = [(getattr(sample, name), sample.expected) for sample in samples]
        answered = [pair for pair in pairs if pair[0] is not None]
        return sum(holds(*pair) for pair in answered) if answered else None

    return count("base") or 0, count("adapted"), count("against")


def _keys(samples: Sequence[Sample]) -> tuple[KeyMatches, ...]:
    """Count the right values of each key of the expected objects, in the order of the keys."""
    expected: Counter[str] = Counter()
    right: dict[str, Counter[str]] = {name: Counter() for name in ("base", "adapted", "against")}
    for sample in samples:
        wanted = _json(sample.expected)
        if not isinstance(wanted, dict):
            continue
        expected.update(wanted.keys())
        for name, counter in right.items():
            answer = getattr(sample, name)
            values = _json(answer) if answer is not None else _INVALID
            if isinstance(values, dict):
                pairs = (
                    (key, values[key], value) for key, value in wanted.items() if key in values
                )
                counter.update(
                    key for key, own, value in pairs if canonical(own) == canonical(value)
                )
    present = {name: any(getattr(each, name) is not None for each in samples) for name in right}
    return tuple(
        KeyMatches(
            key,
            number,
            right["base"][key],
            right["adapted"][key] if present["adapted"] else None,
            right["against"][key] if present["against"] else None,
        )
        for key, number in list(expected.items())[:_MAX_KEYS]
    )


def _json(text: str) -> Any:
    with suppress(ValueError):
        return parse_json(text.encode(), RECORD_LIMITS, "the answer")
    return _INVALID


def canonical(value: Any) -> str:
    """Return a value's JSON, because in Python 1 == True."""
    return json.dumps(value, sort_keys=True)


def _is_same_json(answer: str, expected: str) -> bool:
    one, other = _json(answer), _json(expected)
    return _INVALID not in (one, other) and canonical(one) == canonical(other)
