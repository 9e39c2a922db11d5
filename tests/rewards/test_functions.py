"""Built-in rewards, and the texts that name rewards."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.errors import ConfigError
from mlxtune.rewards.functions import NoRewardError, RewardSpec, last_number, parse_rewards
from mlxtune.rewards.scoring import RewardScorer


def reward(spec: str, text: str, answer: str | None = None) -> float:
    return RewardSpec.parse(spec).built_in()(text, answer)


# Specs


@pytest.mark.parametrize(
    ("text", "name", "weight"),
    [
        ("check.py", "check.reward", 1),
        ("a/check.py:total=0.5", "check.total", 0.5),
        ("check.py=-2", "check.reward", -2),
        ("exact", "exact", 1),
        ("exact=1e-1", "exact", 0.1),
        ("number:0.01=2", "number:0.01", 2),
        ("length:200", "length:200", 1),
        ("regex=a=b", "regex=a=b", 1),
        ("regex=a=5", "regex=a", 5),
        ("regex=a=5=1", "regex=a=5", 1),
    ],
)
def test_spec_is_a_name_with_an_optional_weight(
    text: str, name: str, weight: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, tmp_path / "a"):
        folder.mkdir(exist_ok=True)
        (folder / "check.py").touch()
    monkeypatch.chdir(tmp_path)
    spec = RewardSpec.parse(text)
    assert (spec.name, spec.weight) == (name, weight)
    assert (spec.file is not None) == (".py" in text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("check", "is unknown: name a FILE.py"),
        ("exact:1", "has an argument, which exact does not take"),
        ("exact=nan", "has the weight nan"),
        ("check.py=inf", "has the weight inf"),
        ("missing.py", "cannot be read: No such file or directory: check its path"),
        ("regex=", "has no pattern"),
        ("regex=5", "has no pattern"),
        ("regex=(", "is not a pattern: missing )"),
        ("regex=a{99999}", "is not a pattern: it repeats"),
        ("number:x", "must have the tolerance after the colon, such as number:0.01"),
        ("number:nan", "must have the tolerance after the colon, such as number:0.01"),
        ("number:-1", "the tolerance must not be negative, such as number:0.01"),
        ("length:x", "must have the number of characters after the colon, such as length:200"),
        ("length:-3", "the number of characters must not be negative, such as length:200"),
        ("length:0", "needs a length of at least 1"),
        ("json:missing.json", "cannot be read: No such file or directory: check its path"),
    ],
)
def test_wrong_spec_is_an_error_with_the_remedy(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RewardSpec.parse(text)
    assert problem in str(raised.value)


def test_all_wrong_specs_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_rewards(["exact", "exakt", "regex=("])
    assert len(raised.value.problems) == 2


# Comparisons with the answer


@pytest.mark.parametrize(
    ("spec", "text", "answer", "value"),
    [
        ("exact", " Paris\n", "Paris ", 1),
        ("exact", "paris", "Paris", 0),
        ("exact", "<think>\nLyon?\n</think>\n\nParis", "Paris", 1),
        ("exact", "<think>\nParis", "Paris", 0),
        ("contains", "It is Paris.", "Paris", 1),
        ("contains", "<think>Paris</think>Lyon", "Paris", 0),
        ("regex=^<think>.+</think>", "<think>so</think>x", None, 1),
        ("regex=^<think>.+</think>", "x", None, 0),
        (r"regex=total: (\d+)", "total: 12", "the total: 12 euros", 1),
        (r"regex=total: (\d+)", "total: 13", "the total: 12 euros", 0),
        (r"regex=total: (\d+)", "none", "the total: 12 euros", 0),
        ("length", "abcd", "abcd", 1),
        ("length", "ab", "abcd", 1),
        ("length", "abcdefgh", "abcd", 0.5),
        ("length:2", "abcdefgh", None, 0.25),
        ("length:2", " ", None, 0),
        ("json", ' {"b": [1], "a": null}', '{"a": null, "b": [1]}', 1),
        ("json", '{"a": 1}', '{"a": true}', 0),
        ("json", '```json\n{"a": 1}\n```', '{"a": 1}', 0),
        ("json", '{"a": 1', '{"a": 1}', 0),
        ("json_keys", '{"a": 1, "b": [2]}', '{"b": [2], "a": 1}', 1),
        ("json_keys", '{"a": true, "b": [2]}', '{"b": [2], "a": 1}', 0.5),
        ("json_keys", '{"a": 1, "c": 0, "d": 0}', '{"a": 1, "b": null}', 0.25),
        ("json_keys", "[1]", '{"a": 1}', 0),
        ("json_keys", '{"a": 1', '{"a": 1}', 0),
        ("number", "so it is 1,234.5", "1234.50", 1),
        ("number", "no number", "3", 0),
        ("number:0.5", "2.6", "3", 1),
        ("number", "2.6", "3", 0),
    ],
)
def test_built_in_reward(spec: str, text: str, answer: str | None, value: float) -> None:
    assert reward(spec, text, answer) == value


@pytest.mark.parametrize(
    ("spec", "answer", "why"),
    [
        *((spec, None, "no answer") for spec in ("exact", "contains", "number", "json", "length")),
        ("regex=(a)", None, "no answer"),
        ("exact", " ", "no answer"),
        ("number", "none", "no number"),
        ("json", "{", "not JSON"),
        ("json", '{"a": NaN}', "not JSON"),
        ("json_keys", "[1]", "not a JSON object"),
        ("json_keys", "{}", "not a JSON object with keys"),
        ("regex=(a)", "b", "finds nothing"),
    ],
)
def test_row_that_a_reward_does_not_fit_has_no_reward(
    spec: str, answer: str | None, why: str
) -> None:
    with pytest.raises(NoRewardError, match=why):
        reward(spec, "a", answer)


def test_search_has_a_limit() -> None:
    with pytest.raises(NoRewardError, match="a search takes more than"):
        reward("regex=(?:a|aa)+$", "a" * 200 + "b")


# Numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", 1234.5),
        ("1.234,5", 1234.5),
        ("1.234.567", 1234567),
        ("1,234,567.5", 1234567.5),
        ("1,2,3", 3),
        ("1 234,5", 1234.5),
        ("1\u202f234", 1234),
        ("1'234.50 francs", 1234.5),
        ("1_000", 1000),
        ("1,5", 1.5),
        ("0,123", 0.123),
        (".5", 0.5),
        ("It is 10.", 10),
        ("2, 3", 3),
        ("-3", -3),
        ("\u22123", -3),
        ("x=-3", -3),
        ("7-3", 3),
        ("10 - 3", 3),
        ("$5.20", 5.2),
        ("-$3", -3),
        ("$-3", -3),
        ("USD12", 12),
        ("12 €", 12),
        ("1e5", 1e5),
        ("2.5E-3", 0.0025),
        (r"3.2 \times 10^{5}", 3.2e5),
        ("3 x 10^-2", 0.03),
        ("3/4", 0.75),
        ("-1 3/4", -1.75),
        (r"\frac{3}{4}", 0.75),
        ("on 03/04/2024", 2024),
        ("2024-05-03", 3),
        ("5 g of CO2", 5),
        ("5kg", 5),
        ("3/0", None),
        ("1e9999", None),
        ("9" * 400, None),
        ("none", None),
    ],
)
def test_last_number(text: str, value: float | None) -> None:
    found = last_number(f"Of 17 things: {text}" if value is not None else text)
    assert (None if found is None else found.value) == value


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("12%", "12 %", 1),
        ("12%", "0.12", 1),
        ("12", "12%", 1),
        (r"12\%", "12", 1),
        ("12%", "0.12%", 0),
        ("1,200%", "12", 1),
        ("0.3333333", "1/3", 1),
        ("0.333", "1/3", 0),
    ],
)
def test_percentages_and_fractions(text: str, answer: str, value: float) -> None:
    assert reward("number", text, answer) == value


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["", ",", "e"]))
def test_every_number_equals_itself_as_python_writes_it(number: float, form: str) -> None:
    text = f"{number:{form}}" if form else repr(number)
    found = last_number(f"It is {text}.")
    assert found is not None
    assert math.isclose(found.value, float(text.replace(",", "")), rel_tol=1e-12)


def test_one_reward_must_have_a_weight() -> None:
    with pytest.raises(ConfigError, match="every reward has the weight 0"):
        parse_rewards(["exact=0", "json=-0.0"])
    assert [each.weight for each in parse_rewards(["exact=0", "json=-1"])] == [0, -1]
    assert parse_rewards([]) == ()


@pytest.mark.parametrize(
    ("reward", "hint"),
    [
        ("number=0.01", "has the weight 0.01: if it is the tolerance, write number:0.01"),
        ("length=200", "has the weight 200: if it is the number of characters, write length:200"),
        *((each, "") for each in ("number=0.5", "number:0.01=0.01", "length=-0.1", "exact=0.01")),
        *((each, "") for each in ("number", "length=0", "length:200=200")),
    ],
)
def test_weight_like_an_argument_has_a_hint(reward: str, hint: str) -> None:
    found = RewardSpec.parse(reward).hint
    assert found == (f"reward {reward} {hint}" if hint else "")


@pytest.mark.parametrize(
    ("reward", "meant"),
    [
        *(("good", "good.py"), ("good:other=2", "good.py:other"), ("exakt", "exact")),
        *(("wonder", None), ("x" * 5000, None), ("", None), ("a\0", None)),
    ],
)
def test_unknown_reward_names_a_similar_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str, meant: str | None
) -> None:
    (tmp_path / "good.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is unknown") as raised:
        RewardSpec.parse(reward)
    asked = "" if meant is None else f" (did you mean {meant}?)"
    assert f"is unknown{asked}: name a FILE.py" in str(raised.value)


IMPORTING = """
import json, direct, os.path
from package import part
def reward(prompt, completion, row):
    from later import value
    return value
"""


def test_hash_covers_the_modules_that_imports_reach(tmp_path: Path) -> None:
    file, package = tmp_path / "check.py", tmp_path / "package"
    package.mkdir()
    file.write_text(IMPORTING)
    reached = {
        "direct.py": "import check, indirect",
        "indirect.py": "import not_there",
        "later.py": "value = 1",
        "package/__init__.py": "",
        "package/part.py": "from .sibling import x\nfrom .............. import above",
        "package/sibling.py": "x = 1",
    }
    others = {"json.py": "", "unused.py": "", "package/unused.py": "(", "part.py": ""}
    for name, source in {**reached, **others}.items():
        (tmp_path / name).write_text(source)

    def current() -> str:
        return RewardScorer([RewardSpec.parse(str(file))], 1.0).hash

    before = current()
    assert [name for name, _ in RewardSpec.parse(str(file)).modules] == sorted(reached)
    for name, source in {**reached, **others}.items():
        (tmp_path / name).write_text(f"{source}\n# changed")
        assert (current() != before) == (name in reached), name
        (tmp_path / name).write_text(source)
    file.write_text("import (")
    assert RewardSpec.parse(str(file)).modules == ()
