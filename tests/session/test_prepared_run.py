"""A run's records about itself at its start, and the page and the list made from them."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlxtune
from mlxtune import TrainConfig, TrainingInterrupted, TrainResult, resume, train
from tests.configs import train_to
from tests.models import sums, write_chat
from tests.slow import slow


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("data") / "chat.jsonl", sums(20))


def config(model: Path, chat: Path, folder: Path, **options: Any) -> TrainConfig:
    output = str(folder / "adapters.safetensors")
    options = {"output": output, "quiet": True, "epochs": 2, "samples": 0, **options}
    return TrainConfig(str(model), str(chat), **options)


@pytest.fixture(scope="module")
def run(
    model: Path, chat: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TrainResult]:
    folder = tmp_path_factory.mktemp("run")
    return folder / "checkpoints", train(config(model, chat, folder))


def about(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_run_describes_itself_before_its_first_step(
    model: Path, chat: Path, tmp_path: Path, run: tuple[Path, TrainResult]
) -> None:
    with pytest.raises(TrainingInterrupted):
        train_to(config(model, chat, tmp_path), 1)
    early, whole = about(tmp_path / "checkpoints"), about(run[0])
    for said in (early, whole):
        started = datetime.datetime.fromisoformat(said.pop("started_at"))
        assert abs((datetime.datetime.now(started.tzinfo) - started).total_seconds()) < 600
        said["config"].pop("output")
    assert early == whole


def test_run_reports_model_plan_options_and_data(
    run: tuple[Path, TrainResult], model: Path, chat: Path
) -> None:
    said = about(run[0])
    assert said["model"]["path"] == str(model)
    assert said["model"]["description"].startswith("qwen3, ")
    assert said["lora"]["trainable_parameters"] > 0
    plan = said["plan"]
    steps = (plan["steps"], plan["steps_per_epoch"], plan["rows_train"], plan["rows_validation"])
    assert steps == (8, 4, 16, 4)
    memory = plan["memory"]
    parts = ("weights", "optimizer", "activations", "head")
    assert memory["peak"] == sum(memory[part] for part in parts)
    assert said["config"]["epochs"] == 2
    assert said["config"]["data"] == [str(chat)]
    assert said["versions"]["mlxtune"] == mlxtune.__version__
    metadata = json.loads((run[0] / "best" / "metadata.json").read_text())
    assert said["data_hash"] == metadata["data_hash"]


def test_lengths_are_those_of_all_examples(run: tuple[Path, TrainResult]) -> None:
    lengths, (ledger,) = about(run[0])["lengths"], run[1].ledgers
    assert lengths["examples"] == ledger.examples
    assert lengths["tokens"]["total"] == ledger.tokens
    assert lengths["supervised"]["total"] == ledger.tokens_supervised
    assert lengths["tokens"]["p50"] <= lengths["tokens"]["p95"] <= lengths["tokens"]["max"]


def test_step_records_name_their_execution(run: tuple[Path, TrainResult]) -> None:
    training = run[1].training
    assert training is not None
    for step in training.steps:
        assert 0 < step.memory <= round(run[1].peak_memory_gb * 1e9)
        assert step.micro_batches >= 1
        assert 0 <= step.padding < step.run_tokens


def test_page_and_list_are_of_the_run(run: tuple[Path, TrainResult]) -> None:
    page = (run[0] / "report.html").read_text()
    (summary,) = mlxtune.runs(run[0].parent)
    assert summary.headline.startswith("2 epochs on chat.jsonl ")
    assert summary.headline.rpartition(" validation ")[2] in page
    training = run[1].training
    assert training is not None
    assert (summary.best_val_loss, summary.step) == (training.best_val_loss, 8)
    tokens = sum(step.tokens for step in training.steps)
    seconds = np.sum([step.seconds for step in training.steps])
    assert summary.tokens_per_second == pytest.approx(tokens / seconds)
    assert summary.problems == ()


def test_continuing_run_keeps_its_start(model: Path, chat: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        train_to(config(model, chat, tmp_path), 3)
    folder = tmp_path / "checkpoints"
    (summary,) = mlxtune.runs(tmp_path)
    assert (summary.status, summary.step, summary.total_steps) == ("unfinished", 3, 8)
    said = about(folder) | {"started_at": "2026-03-04T05:06:07+00:00"}
    (folder / "run.json").write_text(json.dumps(said))

    resume(folder, epochs=3)
    after = about(folder)
    assert after["started_at"] == "2026-03-04T05:06:07+00:00"
    assert after["plan"]["steps"] == 12
    assert after["config"]["epochs"] == 3
    (summary,) = mlxtune.runs(tmp_path)
    assert (summary.status, summary.step) == ("finished", 12)


@pytest.fixture(scope="module")
def stopped(model: Path, chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped before its last step, for tests to copy."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(TrainingInterrupted):
        train_to(config(model, chat, folder), 7)
    return folder


@pytest.mark.parametrize("damage", [None, "{", slow("[]"), slow('{"started_at": 7}')])
def test_run_resumes_with_missing_or_damaged_run_json(
    stopped: Path, tmp_path: Path, damage: str | None
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    said = tmp_path / "checkpoints" / "run.json"
    said.unlink()
    if damage is not None:
        said.write_text(damage)
    resume(tmp_path)
    started = datetime.datetime.fromisoformat(about(said.parent)["started_at"])
    assert (datetime.datetime.now(started.tzinfo) - started).total_seconds() < 600


def test_run_whose_page_cannot_be_written_is_a_good_run(
    model: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "report.html").mkdir(parents=True)
    (tmp_path / "checkpoints" / "report.html" / "mine").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxtune.core.run.run_folder._RUN_FILES", ())
        patch.setattr("mlxtune.core.run.run_folder._FILES", set())
        result = train(config(model, chat, tmp_path))
    assert result.adapter is not None
    assert result.adapter.exists()
    assert "warning: " in capsys.readouterr().err
