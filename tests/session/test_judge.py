"""What an evaluation compares an adapter with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtune import EvalConfig, TrainConfig, evaluate, train
from tests.command import Cli
from tests.models import write_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pairs, an adapter in `first`, and one in `second` that began with it."""
    folder = tmp_path_factory.mktemp("judge")
    write_model(folder / "model", "qwen3", num_hidden_layers=1)
    rows = [
        {"prompt": f"{a} plus {b}", "chosen": f"It is {a + b}.", "rejected": f"Is it {a * b}?"}
        for a in range(5)
        for b in range(5)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options: dict[str, Any] = {"objective": "dpo", "lr": 3e-3, "samples": 0, "quiet": True}
    given = (str(folder / "model"), (str(folder / "pairs.jsonl"),))
    first = TrainConfig(*given, output=str(folder / "first"), max_steps=2, **options)
    train(first)
    train(replace(first, output=str(folder / "second"), init_adapter=str(folder / "first")))
    return folder


def evaluation(home: Path, **options: Any) -> Any:
    config = EvalConfig(data=(str(home / "pairs.jsonl"),), quiet=True, **options)
    return evaluate(config)


def test_preferences_are_compared_with_the_initial_adapter(home: Path) -> None:
    found = evaluation(home, adapter=str(home / "second"))
    alone = evaluation(home, adapter=str(home / "first"))
    assert alone.start is None
    assert found.start is not None
    assert found.start.loss == pytest.approx(alone.adapted.loss)
    assert found.preference.before == pytest.approx(alone.preference.after)
    # The verdict at the end of the run says the same.
    run = json.loads((home / "second" / "checkpoints" / "evaluation.json").read_text())
    assert found.start.loss == pytest.approx(run["start"]["loss"])
    assert found.preference.margin_before == pytest.approx(run["preference"]["margin_before"])


def test_missing_first_adapter_is_named(cli: Cli, home: Path, tmp_path: Path) -> None:
    shutil.move(home / "first", tmp_path / "moved")
    try:
        given = ["--adapter", home / "second", "--data", home / "pairs.jsonl"]
        outcome = cli("eval", *given)
        assert f"started from, {home / 'first'}, is missing or has changed" in outcome.err
        named = cli("eval", *given, "--against", tmp_path / "moved", "--json")
        assert json.loads(named.out)["against"] == str(tmp_path / "moved")
    finally:
        shutil.move(tmp_path / "moved", home / "first")
