"""tests/long/step_costs.py on a tiny model, and the environment of Unsloth's side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxtune.config import BenchConfig
from mlxtune.errors import MlxTuneError
from mlxtune.views.console import RunConsole
from tests.long.bench_unsloth import measure
from tests.models import sums, write_chat
from tests.paths import ROOT
from tests.slow import slow


@pytest.fixture(scope="module")
def costs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("costs")
    chat = write_chat(folder / "chat.jsonl", sums(20))
    work = ["--model-path", model, "--data", chat, "--steps", 2, "--repeats", 1]
    further = ["--execution", "gpu", "--against", "mlx-lm", "--json", folder / "costs.json"]
    command = [sys.executable, "-m", "tests.long.step_costs", *work, *further, "--quiet"]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)
    return dict(json.loads((folder / "costs.json").read_text()))


@pytest.mark.slow
def test_costs_of_both_sides_are_those_of_the_same_steps(costs: dict[str, Any]) -> None:
    ours, theirs = costs["ours"], costs["theirs"]
    needed = ours["matmul_flops"]["needed"]
    assert needed == theirs["matmul_flops"]["needed"]
    # The run also computes the gradient of the first layer's output projection.
    assert needed < ours["matmul_flops"]["run"] < 1.1 * needed
    assert theirs["matmul_flops"]["run"] > 1.5 * needed
    assert 0 < ours["launches_per_step"]["head"] < ours["launches_per_step"]["rest"]
    assert theirs["launches_per_step"]["head"] == 0
    assert costs["losses_agree"] is True
    assert [set(kinds) for kinds in ours["products"]] == 2 * [
        {"projections", "LoRA", "attention", "head"}
    ]
    spent = sum(step["seconds"] for step in ours["runs"][0]["steps"])
    floor = sum(sum(kinds.values()) for kinds in ours["products"])
    assert costs["step_efficiency"] == pytest.approx(floor / spent)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        slow(f'#!/bin/sh\nexec {sys.executable} -I "$@"', "No package metadata was found for"),
        (None, "is not a program"),
    ],
)
def test_unsloth_runs_in_the_environment_that_is_named(
    model: Path, chat: Path, tmp_path: Path, script: str | None, said: str
) -> None:
    python = tmp_path / "python"
    config = BenchConfig(str(model), (str(chat),), steps=1, repeats=1, quiet=True)
    console = RunConsole(quiet=True)
    if script is None:
        with pytest.raises(MlxTuneError, match=said):
            measure(config, str(python), console)
        return
    python.write_text(script)
    python.chmod(0o755)
    theirs = measure(config, str(python), console).theirs
    assert theirs is not None
    assert said in str(theirs.failed)
