"""In a benchmark, Unsloth takes the same steps as mlxtune, through callbacks in a thread."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.models.loading import load_base, open_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.benchmark.peers import write_start
from mlxtune.config import TrainConfig
from mlxtune.core.data.encode import Example
from mlxtune.errors import MlxTuneError
from tests import fake_unsloth
from tests.benchmark.test_peers import examples, options, two_spans
from tests.long.unsloth import Turns, Unsloth, row
from tests.models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("unsloth") / "tiny", "qwen3")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("unsloth_zoo", "unsloth_zoo.mlx"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("loader", "trainer"):
        monkeypatch.setitem(sys.modules, f"unsloth_zoo.mlx.{name}", fake_unsloth)
    monkeypatch.setattr("tests.long.unsloth.version", lambda _: "2026.1")


def side(config: TrainConfig, folder: Path, tmp_path: Path) -> Unsloth:
    write_start(open_base(folder, "auto"), config.lora(), tmp_path / "adapter")
    return Unsloth(folder, config)


STEPS = [examples(), two_spans(), examples()]


def test_steps_are_ours_after_a_first_one_that_changes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    config = options(folder)
    theirs = side(config, folder, tmp_path)
    theirs.start(tmp_path / "adapter", STEPS)
    theirs.warm_up(STEPS)
    ours = InstructPipeline(load_base(folder, "float32").model, config.lora())
    ours.load(tmp_path / "adapter")
    for number, step in enumerate(STEPS, 1):
        assert theirs.step(number, step) == pytest.approx(
            ours.train_batch(step, step=number).avg_loss, rel=1e-5
        )
        longest = max(map(len, step))
        real = sum(int(each.assistant_mask.nonzero()[0][-1]) for each in step)
        assert theirs.tokens(step) == (4 * (longest - 1), 4 * (longest - 1) - real)
    assert theirs.execution == "compiled, unsloth_zoo 2026.1"


def test_labels_are_the_supervised_tokens() -> None:
    #         token      5     6     7     8
    #         mask       0     1     0     1
    #         labels  -100     6  -100     8
    example = Example(1, mx.array([5, 6, 7, 8]), [0, 1, 0, 1])  # type: ignore[arg-type]
    assert row(example) == {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]}


def test_steps_of_other_sizes_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MlxTuneError, match="one example a row"):
        side(options(folder), folder, tmp_path).start(tmp_path / "adapter", [examples()[:3]])


def test_matrices_that_it_would_not_train_are_refused(folder: Path, tmp_path: Path) -> None:
    config = options(folder, dora=True)
    with pytest.raises(MlxTuneError, match="other matrices"):
        side(config, folder, tmp_path).start(tmp_path / "adapter", STEPS)


def test_work_is_done_in_one_thread_that_waits_at_each_step() -> None:
    turns, seen = Turns(), []

    def train() -> None:
        for step in (1, 2, 3):
            seen.append((step, threading.current_thread()))
            turns.on_loss(step, 3, step / 10)

    turns.take(lambda: seen.append((0, threading.current_thread())))
    assert turns.take(train) == 0.1
    assert turns.take() == 0.2
    assert [step for step, _ in seen] == [0, 1, 2]
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] is not threading.current_thread()


def test_error_of_the_trainer_is_raised_where_the_step_is_asked_for() -> None:
    def train() -> Any:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        Turns().take(train)


def test_moments_of_the_first_step_are_forgotten_in_place() -> None:
    turns = Turns()
    optimizer = SimpleNamespace(state={"step": mx.array(1), "a": {"m": mx.ones(3)}})
    args = SimpleNamespace(learning_rate=0.5)
    tree = optimizer.state
    for seen, rate, moment in ((7, 0.0, 0.0), (12, 0.5, 1.0)):
        turns.on_pre_optimizer_step(args, None, None, optimizer=optimizer)
        assert optimizer.learning_rate == rate
        state = SimpleNamespace(num_input_tokens_seen=seen)
        turns.on_step_end(args, state, None, optimizer=optimizer)
        assert tree["a"]["m"].tolist() == [moment] * 3
        tree["a"]["m"] = mx.ones(3)
        turns._taken += 1
    assert turns.batch_tokens == 5
