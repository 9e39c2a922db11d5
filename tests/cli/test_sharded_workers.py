"""`mlxtune train --parallel tensor`: workers that share one model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlxtune import TrainConfig, train
from mlxtune.backend.models.loading import open_base
from mlxtune.backend.workers import shards
from mlxtune.errors import ConfigError, ModelError
from tests.cli.test_workers import adapter, arguments, has_ended, resumed, steps_in
from tests.launch import launched, needs_ring, pid_of, run
from tests.models import sums, write_chat, write_model
from tests.paths import DATA
from tests.waiting import SECONDS, wait_until

OPTIONS = {"max_steps": 8, "save_steps": 2, "parallel": "tensor"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run on two workers."""
    folder = tmp_path_factory.mktemp("whole")
    run(2, arguments(folder, **OPTIONS), folder / "log")
    return folder


@pytest.mark.slow
@needs_ring
def test_workers_that_share_a_model_write_the_adapter_that_one_does(
    whole: Path, tmp_path: Path
) -> None:
    options = {**OPTIONS, "parallel": "data", "val_rows": 8, "samples": 0, "dropout": 0.1}
    model = str(DATA / "demo-qwen3")
    config = TrainConfig(
        model_path=model,
        data=(str(DATA / "bookings_test.jsonl"),),
        output=str(tmp_path / "adapters.safetensors"),
        quiet=True,
        **options,
    )
    train(config)
    found, expected = (load_file(each / "adapters.safetensors") for each in (whole, tmp_path))
    assert found.keys() == expected.keys()
    largest = max(np.abs(value).max() for value in expected.values())
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-4 * largest, name
    import mlx.core as mx
    import mlx_lm

    logits = []
    for folder in (whole, tmp_path):
        loaded, *_ = mlx_lm.load(model, adapter_path=str(folder))
        loaded.set_dtype(mx.float32)
        logits.append(np.array(loaded(mx.array([[5, 9, 2, 7, 7, 3]]))))
    np.testing.assert_allclose(*logits, atol=1e-4)
    one, other = (
        json.loads((each / "checkpoints" / "evaluation.json").read_text())
        for each in (whole, tmp_path)
    )
    assert one["adapted"]["loss"] == pytest.approx(other["adapted"]["loss"], rel=1e-5)
    said = (whole / "log").read_text()
    assert "parameters over 2 workers" in said
    assert said.count("Verdict") == 1


@needs_ring
@pytest.mark.long
def test_a_killed_worker_ends_both_and_they_resume_to_the_byte(whole: Path, tmp_path: Path) -> None:
    with launched(2, arguments(tmp_path, **OPTIONS), tmp_path / "log") as launch:
        wait_until(lambda: steps_in(tmp_path) > 3)
        first = pid_of(launch, 0)
        os.kill(pid_of(launch, 1), signal.SIGKILL)
        wait_until(lambda: has_ended(first))
        launch.wait(SECONDS)
    said = (tmp_path / "log").read_text()
    assert "worker 1 is gone after step" in said
    resumed(2, tmp_path)
    assert adapter(tmp_path) == adapter(whole)


@needs_ring
@pytest.mark.long
def test_model_that_cannot_be_split_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "gemma3_text")
    data = write_chat(tmp_path / "data.jsonl", sums(8))
    options = {"model_path": model, "data": data, "max_steps": 1, "parallel": "tensor"}
    said = run(2, arguments(tmp_path, **options), tmp_path / "log")
    assert "--parallel tensor cannot shard models of type gemma3_text, only glm4_moe" in said
    assert "Traceback" not in said


def test_a_model_that_workers_cannot_share_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "gemma", "gemma3_text")
    with pytest.raises(ModelError, match=r"cannot shard models of type gemma3_text, only glm4_moe"):
        shards._check(open_base(model, "float32"), 2)
    model = write_model(tmp_path / "qwen", "qwen3")
    with pytest.raises(
        ModelError, match=r"over 3 workers: its \w+ is \d+: start a number of workers"
    ):
        shards._check(open_base(model, "float32"), 3)


def test_options_that_do_not_go_with_a_split_model_are_refused(tmp_path: Path) -> None:
    def problem(**options: object) -> str:
        with pytest.raises(ConfigError) as caught:
            train(TrainConfig(model_path="any", data=("any",), **options))
        return str(caught.value)

    assert "--dora does not work with --parallel tensor" in problem(parallel="tensor", dora=True)
    assert "--init pissa does not work" in problem(parallel="tensor", init="pissa")
    assert "--quantize nf4 does not work" in problem(parallel="tensor", quantize="nf4")
    assert "workers of its ring into groups" in problem(parallel="tensor:2")
    assert "must be data or tensor, not 'both'" in problem(parallel="both")
    assert "needs several workers" in problem(parallel="tensor")
