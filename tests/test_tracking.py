"""The values that trackers receive, and runs whose tracker fails or is missing."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxtune import ConfigError, TrainConfig, train, verify
from mlxtune.core.run.run_folder import TRACKING, find_resume_point
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import TrainingInterrupted
from mlxtune.tracking import TRACKERS, TrackedRun, TrackingObserver, Value
from tests.core.training.fake_pipeline import CORPUS, FakePipeline, options
from tests.models import sums, write_chat


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the trackers that a test replaces."""
    monkeypatch.setitem(TRACKERS, "wandb", TRACKERS["wandb"])


class FakeTracker:
    """Keeps the values that it receives; fails at step `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.runs: list[TrackedRun] = []
        self.logs: list[tuple[int, dict[str, float]]] = []
        self.ends: list[tuple[dict[str, Value], bool]] = []

    def open(self, run: TrackedRun) -> FakeTracker:
        self.runs.append(run)
        return self

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step == self.fails_at:
            raise RuntimeError("the server\nis gone")
        self.logs.append((step, dict(values)))

    def finish(self, result: Mapping[str, Value], complete: bool) -> None:
        self.ends.append((dict(result), complete))


def tracked(
    run: Path,
    tracker: FakeTracker,
    *,
    resume: bool = False,
    stop_at: int | None = None,
    **given: Any,
) -> list[str]:
    """Train with a tracker in a run's folder; return the warnings."""
    TRACKERS["wandb"] = tracker.open
    warnings: list[str] = []
    output = str(run / "adapters.safetensors")
    config = TrainConfig("model", ("a.jsonl", "b.jsonl"), output=output, **given)
    trainer = InstructTrainer(
        FakePipeline(),
        CORPUS,
        options(run / "checkpoints"),
        observer=TrackingObserver("wandb", config, warnings.append),
        stop_after=stop_at,
    )
    trainer.train(resume=find_resume_point(run / "checkpoints") if resume else None)
    return warnings


def test_steps_validations_and_epochs_are_logged_by_their_step(tmp_path: Path) -> None:
    tracker = FakeTracker()
    assert tracked(tmp_path, tracker) == []

    lines = (tmp_path / "checkpoints/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    expected: list[tuple[int, dict[str, float]]] = []
    step = 0
    for record in records:
        if record["kind"] == "step":
            step = record["step"]
            values = {
                "train/loss": record["loss"],
                "train/perplexity": record["perplexity"],
                "train/learning_rate": record["learning_rate"],
                "train/grad_norm": record["grad_norm"],
                "train/tokens_per_second": record["tokens"] / max(record["seconds"], 1e-9),
                "train/epoch": record["epoch"],
            }
        elif record["kind"] == "validation":
            values = {"val/loss": record["val_loss"], "val/perplexity": record["val_perplexity"]}
        else:
            values = {
                "epoch/train_loss": record["train_loss"],
                "epoch/samples_per_second": record["samples_per_sec"],
            }
        expected.append((step, values))
    assert tracker.logs == expected


def test_options_are_hyperparameters_and_the_result_ends_the_run(tmp_path: Path) -> None:
    tracker = FakeTracker()
    tracked(tmp_path / "birds", tracker)
    (run,) = tracker.runs
    assert run.name == "birds"
    assert run.step == 0
    assert run.hyperparameters["rank"] == 8
    assert run.hyperparameters["targets"] == "q_proj,v_proj"
    assert run.hyperparameters["total_steps"] == 6
    assert "val_data" not in run.hyperparameters
    ((result, complete),) = tracker.ends
    assert complete
    assert result["steps"] == 6
    assert result["best_epoch"] == 1
    assert result["best_val_loss"] == pytest.approx(3.0, abs=0.1)
    assert result["stopped_early"] is False


def test_run_with_rewards_has_mean_rewards_instead_of_losses(tmp_path: Path) -> None:
    tracker = FakeTracker()
    tracked(tmp_path, tracker, objective="grpo", reward=("json",))
    lines = (tmp_path / "checkpoints/metrics.jsonl").read_text().splitlines()
    losses = [each["val_loss"] for line in lines if "val_loss" in (each := json.loads(line))]
    logged = [values for _, values in tracker.logs if values.keys() & {"val/loss", "val/reward"}]
    assert logged[0] == {"val/reward": -losses[0]}
    assert all(values.keys() == {"val/reward"} for values in logged)
    ((result, _),) = tracker.ends
    assert result["initial_val_reward"] == -losses[0]
    assert result["best_val_reward"] == -min(losses)
    assert not result.keys() & {"initial_val_loss", "best_val_loss"}


def test_resumed_run_is_the_same_run_for_the_tracker(tmp_path: Path) -> None:
    first, second = FakeTracker(), FakeTracker()
    with pytest.raises(TrainingInterrupted):
        tracked(tmp_path, first, stop_at=4)
    assert first.ends == [({}, False)]
    tracked(tmp_path, second, resume=True)
    assert second.runs[0].identity == first.runs[0].identity
    assert second.runs[0].step == 4
    assert [step for step, values in second.logs if "train/loss" in values] == [5, 6]
    assert second.ends[0][1]


def test_epoch_that_ends_as_a_run_resumes_has_its_last_step(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        tracked(tmp_path, FakeTracker(), stop_at=3)
    tracker = FakeTracker()
    tracked(tmp_path, tracker, resume=True)
    assert [step for step, values in tracker.logs if "epoch/train_loss" in values] == [3, 6]


def test_run_first_tracked_on_resume_is_new_to_the_tracker(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        tracked(tmp_path, FakeTracker(), stop_at=4)
    (tmp_path / "checkpoints" / TRACKING).unlink()
    tracker = FakeTracker()
    tracked(tmp_path, tracker, resume=True)
    assert tracker.runs[0].step == 0
    assert [step for step, values in tracker.logs if "train/loss" in values] == [5, 6]


@pytest.mark.parametrize("content", ["", "[]", '{"wandb": "../../elsewhere"}', '{"wandb": 3}'])
def test_invalid_identity_is_ignored(tmp_path: Path, content: str) -> None:
    with pytest.raises(TrainingInterrupted):
        tracked(tmp_path, FakeTracker(), stop_at=4)
    (tmp_path / "checkpoints" / TRACKING).write_text(content)
    tracker = FakeTracker()
    assert tracked(tmp_path, tracker, resume=True) == []
    assert re.fullmatch("[0-9a-f]{8}", tracker.runs[0].identity)
    assert tracker.runs[0].step == 0


def test_new_run_in_the_folder_is_another_run_for_the_tracker(tmp_path: Path) -> None:
    first, second = FakeTracker(), FakeTracker()
    tracked(tmp_path, first)
    tracked(tmp_path, second)
    assert second.runs[0].identity != first.runs[0].identity


def test_failing_tracker_is_reported_once_and_disabled(tmp_path: Path) -> None:
    tracker = FakeTracker(fails_at=2)
    warnings = tracked(tmp_path, tracker)
    assert warnings == ["--track wandb: the server is gone; training continues without it"]
    assert max(step for step, _ in tracker.logs) == 1
    assert not tracker.ends
    assert (tmp_path / "checkpoints/epoch-2").is_dir()


def test_run_continues_without_a_tracker_that_cannot_be_opened(tmp_path: Path) -> None:
    tracker = FakeTracker()
    tracker.runs = None  # type: ignore[assignment]
    (warning,) = tracked(tmp_path, tracker)
    assert warning.startswith("--track wandb: ")
    assert not tracker.logs
    assert not tracker.ends
    assert (tmp_path / "checkpoints/epoch-2").is_dir()


def test_unknown_tracker_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match="--track must be one of trackio, tensorboard, wandb, not"
    ):
        TrainConfig("model", "data.jsonl", track=("wandb", "mlflow"))


def test_missing_package_is_an_error_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name)
    )
    with pytest.raises(ConfigError, match=r"--track wandb .*pip install 'mlxtune-lora\[wandb\]'"):
        train(TrainConfig("no/model", "no/data.jsonl", track="wandb"))


def test_replay_of_a_tracked_run_is_neither_tracked_nor_profiled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def observer(name: str, config: TrainConfig, warn: Any) -> TrainingObserver:
        asked.append((name, config.profile_interval))
        return TrainingObserver()

    monkeypatch.setattr("mlxtune.commands.train.check_trackers", lambda names: None)
    monkeypatch.setattr("mlxtune.commands.train.TrackingObserver", observer)
    chat = write_chat(tmp_path / "chat.jsonl", sums(8))
    output = str(tmp_path / "out/adapters.safetensors")
    options: dict[str, Any] = {
        "output": output,
        "quiet": True,
        "samples": 0,
        "track": ["wandb", "wandb"],
    }
    train(TrainConfig(str(model), str(chat), profile_interval=1, **options))
    assert verify(tmp_path / "out", replay=True).ok
    assert asked == [("wandb", 1)]
