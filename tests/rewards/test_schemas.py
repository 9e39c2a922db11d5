"""Rewards by a JSON schema, which may run forever: the helper process applies it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.prompt import PromptRow
from mlxtune.core.files.processes import ProcessEndedError
from mlxtune.errors import ConfigError
from mlxtune.rewards.functions import RewardSpec
from mlxtune.rewards.scoring import Reward, RewardScorer
from tests.waiting import SECONDS

Schemas = Callable[..., RewardScorer]
ROW = PromptRow([], None, {}, Path("rows.jsonl"), 1)

# As pydantic writes a model within a model.
SCHEMA = {
    "type": "object",
    "required": ["day", "guest"],
    "properties": {
        "day": {"type": "string", "pattern": "^[A-Z][a-z]+day$"},
        "guest": {"$ref": "#/$defs/Guest"},
    },
    "patternProperties": {"^x-": {"type": "integer"}},
    "$defs": {"Guest": {"properties": {"age": {"type": "integer"}}, "required": ["age"]}},
}
ALLOWED = {
    '{"day": "Monday", "guest": {"age": 3}}': 1,
    '<think>{</think>{"day": "Monday", "guest": {"age": 3.0}}': 1,
    '{"day": "Monday", "guest": {"age": true}}': 0,
    '{"day": "monday", "guest": {"age": 3}}': 0,
    '{"day": "Monday", "guest": {"age": 3}, "x-a": 1}': 1,
    '{"day": "Monday", "guest": {"age": 3}, "x-a": "b"}': 0,
    '{"day": "Monday"}': 0,
    '{"day": "Monday", "guest": {"age": NaN}}': 0,
    "Monday": 0,
}
_LISTS = {"type": "array", "items": {"$ref": "#"}}
# Schemas that take forever for `ENDLESS`.
SLOW: dict[str, Any] = {
    "pattern": {"items": {"pattern": "^(a+)+$"}},
    "names": {"items": {"propertyNames": {"pattern": "^(a+)+$"}}},
    "properties": {"items": {"patternProperties": {"^(a+)+$": True}}},
    "branches": {"anyOf": [_LISTS, {**_LISTS, "title": "another"}]},
}
_LONG = "a" * 60 + "b"
ENDLESS = json.dumps([json.loads("[" * 60 + "2" + "]" * 60), _LONG, {_LONG: 1}])


@pytest.fixture
def schemas(tmp_path: Path) -> Schemas:
    """Returns a scorer with schemas, whose texts or values are given by name."""

    def make(**named: Any) -> RewardScorer:
        for name, schema in named.items():
            text = schema if isinstance(schema, str) else json.dumps(schema)
            (tmp_path / f"{name}.json").write_text(text)
        specs = [RewardSpec.parse(f"json:{tmp_path}/{name}.json") for name in named]
        return RewardScorer(specs, SECONDS)

    pytest.importorskip("jsonschema")
    return make


def problem(reward: Reward) -> str:
    (problem,) = reward.problems
    return problem


def test_schema_allows_an_answer(schemas: Schemas) -> None:
    with schemas(schema=SCHEMA) as scorer:
        assert {text: scorer.score(ROW, text).total for text in ALLOWED} == ALLOWED


def test_schema_that_cannot_be_applied_gives_no_reward(schemas: Schemas) -> None:
    """References are not downloaded."""
    far, endless = {"$ref": "https://example.com/schema.json"}, {"$ref": "#"}
    with schemas(far=far, endless=endless) as scorer:
        problems = scorer.score(ROW, "1").problems
    start = "rows.jsonl:1: reward json:{}.json: the schema cannot be applied: "
    assert problems[0].startswith(start.format("far"))
    assert "example.com" in problems[0]
    assert problems[1].startswith(start.format("endless"))
    assert "recursion" in problems[1]


@pytest.mark.slow
def test_every_slow_schema_is_ended_after_the_time_of_a_function(schemas: Schemas) -> None:
    # The key "patternProperties" may be written with escapes.
    properties = json.dumps(SLOW["properties"]).replace("patternP", r"\u0070atternP")
    with schemas(**{**SLOW, "properties": properties}) as scorer:
        scorer._timeout = 0.2
        reward = scorer.score(ROW, ENDLESS)
        scorer._timeout = SECONDS
        assert scorer.score(ROW, "[]").total == len(SLOW)
    assert reward.problems == tuple(
        f"rows.jsonl:1: reward json:{name}.json: took more than 0.2 s: make it faster, or raise "
        "--reward-timeout"
        for name in SLOW
    )


def test_search_ends_even_if_its_parent_has_ended(schemas: Schemas) -> None:
    """No thread of the process runs meanwhile, which could see the parent's end."""
    with schemas(slow=SLOW["pattern"]) as scorer:
        given = {"value": [_LONG], "seconds": 0.05}
        request = {"id": 0, "name": "json:slow.json", "seed": 0, "given": given}
        process = scorer._process
        assert process is not None
        with pytest.raises(ProcessEndedError, match="time"):
            scorer._ask(request, SECONDS)
        assert process._process.returncode == -signal.SIGPROF


def test_name_of_a_schema_has_no_folder(tmp_path: Path) -> None:
    """Names are in records, tables and model cards."""
    pytest.importorskip("jsonschema")
    (tmp_path / "schema.json").write_text("{}")
    assert RewardSpec.parse(f"json:{tmp_path}/schema.json=2").name == "json:schema.json"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "wrong JSON schema: \\[\\] is not of type 'object', 'boolean'"),
        ('{"type": "int"}', "wrong JSON schema: 'int' is not valid"),
        ('{"pattern": "("}', "wrong JSON schema: '[(]' is not a 'regex'"),
        ('{"patternProperties": {"(": true}}', "wrong JSON schema: '[(]' is not a 'regex'"),
        ("{", "the schema"),
        ("", "the schema"),
    ],
)
def test_wrong_schema_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    pytest.importorskip("jsonschema")
    (tmp_path / "schema.json").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        RewardSpec.parse(f"json:{tmp_path}/schema.json")


def test_schema_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    (tmp_path / "schema.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"needs jsonschema: .*'mlxtune-lora\[schema\]'"):
        RewardSpec.parse(f"json:{tmp_path}/schema.json")
