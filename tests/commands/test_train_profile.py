"""`--profile-interval` in a whole run: the same adapter, a file, and a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mlxtune
from mlxtune import TrainConfig, TrainingInterrupted, train
from tests.configs import train_to
from tests.models import sums, write_chat


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("data") / "chat.jsonl", sums(12))


def config(model: Path, chat: Path, folder: Path, **options: Any) -> TrainConfig:
    output = str(folder / "adapters.safetensors")
    given = {"output": output, "epochs": 2, "lr": 1e-2, "samples": 0, **options}
    return TrainConfig(str(model), str(chat), **given)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "checkpoints/profile.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_profiled_run_writes_the_same_adapter(
    model: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(model, chat, tmp_path / "plain", quiet=True))
    assert not (tmp_path / "plain/checkpoints/profile.jsonl").exists()
    result = train(config(model, chat, tmp_path / "profiled", profile_interval=2))

    plain, profiled = (tmp_path / name / "adapters.safetensors" for name in ("plain", "profiled"))
    assert plain.read_bytes() == profiled.read_bytes()

    assert result.training is not None
    seconds = {record.step: record.seconds for record in result.training.steps}
    steps = lines_of(tmp_path / "profiled")
    assert [line["step"] for line in steps] == [2, 4, 6]
    for line in steps:
        assert line["seconds"] == pytest.approx(seconds[line["step"]], rel=0.1)
        parts = sum(phase["seconds"] for phase in line["phases"].values())
        assert parts == pytest.approx(line["seconds"], abs=1e-9)
    said = capsys.readouterr().err
    assert said.count("Profile     step ") == 3
    assert "Profile     3 steps profiled" in said


def test_profile_continues_with_the_run(model: Path, chat: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        train_to(config(model, chat, tmp_path, quiet=True, profile_interval=1), 4)
    mlxtune.resume(tmp_path, profile_interval=2)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 6]
