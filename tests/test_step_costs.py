"""tests/long/step_costs.py on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import sums, write_chat
from tests.paths import ROOT


@pytest.fixture(scope="module")
def costs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("costs")
    chat = write_chat(folder / "chat.jsonl", sums(20))
    work = ["--model-path", model, "--data", chat, "--steps", 2, "--repeats", 1]
    further = ["--execution", "gpu", "--against", "mlx-lm", "--json", folder / "costs.json"]
    command = [sys.executable, "-m", "tests.long.step_costs", *work, *further, "--quiet"]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)
    return dict(json.loads((folder / "costs.json").read_text()))


@pytest.mark.long
def test_costs_of_both_contestants_are_of_the_same_steps(costs: dict[str, Any]) -> None:
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
