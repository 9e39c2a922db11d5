"""The phases of a profiled step from the borders between them, and the file of profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.run.profile import (
    PROFILE,
    Phase,
    PhaseTimer,
    StepProfile,
    StepProfiler,
)
from mlxtune.core.run.run_folder import find_resume_point
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import NonFiniteLossError
from tests.core.training.fake_pipeline import CORPUS, FakePipeline, options
from tests.core.training.profiles import FakeMeter, Ticking


def test_time_between_borders_belongs_to_the_phase_that_ends() -> None:
    times = iter([10.0, 11.0, 15.0, 16.5, 18.5, 19.0])
    memory = iter([(100, 0), (110, 120), (400, 500), (150, 450), (150, 0), (90, 160)])
    timer = PhaseTimer(lambda: next(memory), lambda: next(times))
    for name in ("data", "forward", "backward", "forward"):
        timer.end(name)
    found = timer.finish(7)

    assert found.step == 7
    assert found.seconds == 9.0
    assert dict(found.phases) == {
        "data": Phase(1.0, 20, 120),
        # Two stretches: 4 s that start at 110 bytes, and 2 s without an allocation.
        "forward": Phase(6.0, 390, 500),
        "backward": Phase(1.5, 50, 450),
        "other": Phase(0.5, 10, 160),
    }
    assert list(found.phases) == ["data", "forward", "backward", "other"]


def test_phases_add_up_to_the_step() -> None:
    timer = PhaseTimer(FakeMeter().memory)
    for name in ("data", "loss", "data", "clip"):
        timer.end(name)
    found = timer.finish(1)
    total = sum(phase.seconds for phase in found.phases.values())
    assert total == pytest.approx(found.seconds, abs=1e-12)


class Profiled:
    """A profiled run of a fake pipeline, by default two epochs of three steps."""

    def __init__(self, folder: Path, interval: int, pipeline: FakePipeline | None = None) -> None:
        self.meter = FakeMeter()
        self.heard: list[StepProfile] = []
        self.warnings: list[str] = []
        self.folder = folder
        self.profiler = StepProfiler(
            interval,
            self.meter,
            folder,
            on_record=self.heard.append,
            on_problem=self.warnings.append,
            clock=Ticking(),
        )
        self.pipeline = pipeline or FakePipeline(train_loss=self.loss)

    def loss(self, step: int) -> float:
        if self.meter.timer:
            self.meter.timer.end("loss")
        return 4.0 / step

    def train(self, *, resume: bool = False, **changes: Any) -> None:
        trainer = InstructTrainer(
            self.pipeline, CORPUS, options(self.folder, **changes), profiler=self.profiler
        )
        trainer.train(resume=find_resume_point(self.folder) if resume else None)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / PROFILE).read_text().splitlines()]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines()]


def test_only_every_nth_step_is_profiled(tmp_path: Path) -> None:
    run = Profiled(tmp_path, 2)
    run.train()
    assert run.steps() == [2, 4, 6]
    assert run.meter.attached == [True, False] * 3


def test_step_has_its_phases(tmp_path: Path) -> None:
    run = Profiled(tmp_path, 6)
    run.train()
    (line,) = run.lines()
    # The clock is read when the step begins, when its loss is known, and when it ends.
    assert line["seconds"] == 2.0
    assert {name: phase["seconds"] for name, phase in line["phases"].items()} == {
        "loss": 1.0,
        "other": 1.0,
    }
    (heard,) = run.heard
    assert heard.seconds == 2.0


@pytest.mark.parametrize(("interval", "profiled"), [(1, [1, 3, 4, 5, 6]), (2, [4, 6])])
def test_unapplied_step_is_not_profiled(tmp_path: Path, interval: int, profiled: list[int]) -> None:
    class Failing(FakePipeline):
        def train_batch(self, examples: Any, *, step: int, learning_rate: float) -> Any:
            found = super().train_batch(examples, step=step, learning_rate=learning_rate)
            if step == 2:
                raise NonFiniteLossError("step 2: the loss is nan")
            return found

    run = Profiled(tmp_path, interval, Failing())
    run.train()
    assert run.steps() == profiled
    assert run.meter.timer is None


def test_profile_continues_when_the_run_continues(tmp_path: Path) -> None:
    Profiled(tmp_path, 1).train(max_steps=4, save_steps=1, keep=9)
    # After a crash, the newest checkpoint is of step 3, and the profile has a fourth step.
    for path in (tmp_path / "epoch-2", tmp_path / "step-4"):
        for file in path.glob("manifest.json"):
            file.unlink()

    again = Profiled(tmp_path, 1)
    again.train(resume=True, save_steps=1)

    assert again.steps() == [1, 2, 3, 4, 4, 5, 6]
    assert not again.warnings


def test_new_run_in_the_folder_begins_a_new_profile(tmp_path: Path) -> None:
    Profiled(tmp_path, 1).train()
    again = Profiled(tmp_path, 3)
    again.train()
    assert again.steps() == [3, 6]
    assert (tmp_path / "previous-1" / PROFILE).exists()


def test_unwritable_profile_is_reported_once_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / PROFILE).mkdir(parents=True)
    run = Profiled(tmp_path, 1)
    for step in (1, 2):
        with run.profiler.step(step):
            pass
        run.profiler.record()
    assert len(run.heard) == 2
    assert len(run.warnings) == 1
    assert str(tmp_path / PROFILE) in run.warnings[0]
