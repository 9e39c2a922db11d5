"""Options of objectives: errors name each unsuitable option and a remedy."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from mlxtune.config.objective_config import parse_reward
from tests.configs import config, problems
from tests.sources import PACKAGE, nodes_of


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"objective": "dopo"},
            "--objective must be one of sft, dpo, orpo, cpo, simpo, kto, grpo, not 'dopo'",
        ),
        ({"beta": 0.1}, "--beta goes with a preference objective: leave it out"),
        ({"objective": "dpo", "beta": 0.0}, "--beta must be above 0, not 0.0"),
        (
            {"objective": "dpo", "dpo_loss": "exo_pair"},
            "--dpo-loss exo_pair needs --label-smoothing above 0, such as 0.001",
        ),
        (
            {"objective": "dpo", "label_smoothing": 0.1},
            "--label-smoothing goes with --dpo-loss exo_pair, robust, aot, aot_unpaired: "
            "leave it out",
        ),
        (
            {"objective": "dpo", "dpo_loss": "robust", "label_smoothing": 0.5},
            "--label-smoothing must be below 0.5, not 0.5",
        ),
        (
            {"objective": "orpo", "dpo_loss": "ipo"},
            "--dpo-loss goes with --objective dpo: leave it out",
        ),
        (
            {"objective": "dpo", "gamma": 2.0},
            "--gamma goes with --objective simpo: leave it out",
        ),
        (
            {"objective": "kto", "sft_weight": 1.0},
            "--sft-weight goes with --objective dpo: leave it out",
        ),
        (
            {"objective": "dpo", "desirable_weight": 2.0},
            "--desirable-weight goes with --objective kto: leave it out",
        ),
        (
            {"objective": "dpo", "format": "chat"},
            "--format chat goes with --objective sft: leave it out",
        ),
    ],
)
def test_option_that_does_not_fit_is_named_with_what_to_do(
    options: dict[str, Any], problem: str
) -> None:
    assert problems(**options) == [problem]


def test_all_problems_of_an_objective_are_reported_at_once() -> None:
    assert len(problems(objective="kto", gamma=2.0, sft_weight=1.0, dpo_loss="ipo")) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "dpo", "dpo_loss": "exo_pair", "label_smoothing": 0.001},
        {"objective": "cpo", "label_smoothing": 0.1, "cpo_alpha": 0.5},
        {"objective": "kto", "kto_loss": "apo_zero_unpaired", "undesirable_weight": 2.0},
    ],
)
def test_options_that_fit_are_taken(options: dict[str, Any]) -> None:
    assert config(**options).objective == options["objective"]


def test_code_asks_an_objective_instead_of_its_name_or_type() -> None:
    """Only the engine tells apart the types, because core cannot build a loss of arrays."""
    by_name, by_type = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if (
                isinstance(node, ast.Compare)
                and ast.unparse(node.comparators[0]) == "REWARD_OBJECTIVES"
            ):
                by_name.add(path.name)
            if isinstance(node, ast.Call) and re.fullmatch(
                r"isinstance\(.*Objective\)", ast.unparse(node)
            ):
                by_type.add(path.name)
    assert by_name == {"objective_config.py"}
    assert by_type == {"engine.py"}


@pytest.mark.parametrize(
    ("text", "kind", "argument", "weight", "file", "changed"),
    [
        ("a/check.py", "function", "", 1, "a/check.py", "<a/check.py>"),
        ("a/check.py:f=-2", "function", "f", -2, "a/check.py", "<a/check.py>:f=-2"),
        ("~/b c.py=.5", "function", "", 0.5, "~/b c.py", "<~/b c.py>=.5"),
        ("a=1/check.py:f", "function", "f", 1, "a=1/check.py", "<a=1/check.py>:f"),
        ("json:a.py/s.json=2", "json", "a.py/s.json", 2, "a.py/s.json", "json:<a.py/s.json>=2"),
        ("json", "json", "", 1, "", "json"),
        ("json=0.5", "json", "", 0.5, "", "json=0.5"),
        ("regex=a/b.py", "regex", "a/b.py", 1, "", "regex=a/b.py"),
        ("regex=x=3=2", "regex", "x=3", 2, "", "regex=x=3=2"),
        ("length:20=0.1", "length", "20", 0.1, "", "length:20=0.1"),
        ("function:f", "function", "f", 1, "", "function:f"),
        ("check.py:1", "check.py", "1", 1, "", "check.py:1"),
    ],
)
def test_reward_has_parts_and_only_its_file_is_changed(
    text: str, kind: str, argument: str, weight: float, file: str, changed: str
) -> None:
    found = parse_reward(text)
    assert (found.kind, found.argument, found.weight, found.file) == (kind, argument, weight, file)
    assert found.is_code is changed.startswith("<")
    assert found.with_file(lambda path: f"<{path}>") == changed
