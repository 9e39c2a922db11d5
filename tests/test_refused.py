"""No training step launches a kernel that CUDA refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlxtune.backend.lora import apply
from mlxtune.backend.lora.vectors import ROW, LoRAVectors
from tests.backend.step.executions import fresh, model_folder
from tests.long.architectures import ARCHITECTURES
from tests.long.counts import Traced
from tests.long.refused import EXECUTIONS, refused, refused_in
from tests.slow import slow_except

QUICK = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_5", "mamba2", "deepseek_v3", "lfm2")


@pytest.mark.parametrize("how", ["plain", "whole head"])
@pytest.mark.parametrize("name", slow_except(ARCHITECTURES, *QUICK))
def test_no_launch_of_a_step_is_refused(name: str, how: str, tmp_path: Path) -> None:
    assert not refused_in(name, tmp_path / "m", EXECUTIONS[how])


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_no_launch_of_a_step_with_a_separate_head_is_refused(name: str, tmp_path: Path) -> None:
    assert not refused_in(name, tmp_path / "m", EXECUTIONS["best"])


def test_no_launch_joins_an_empty_array() -> None:
    """The matrices fill whole rows of their vector, so the vector needs no padding."""
    config: dict[str, Any] = {"lora_rank": 16, "targets": ("q_proj",)}
    model = fresh(model_folder("qwen3"), **config).model
    vectors, matrices = LoRAVectors(model, apart=False), model.trainable_parameters()
    (joined,) = vectors.join(matrices)
    # A (64, 16) and B (16, 64) of two layers.
    assert joined.size == 4 * 64 * 16 == 4 * ROW

    def join(scale: mx.array) -> Traced:
        return vectors.join(tree_map(lambda value: value * scale, matrices)), []

    assert not refused(join, mx.array(2.0))


def test_launches_on_empty_arrays_are_found() -> None:
    def empty(x: mx.array) -> Traced:
        return [mx.exp(x[:0]), mx.concatenate([x, x[2:2]]), x[:, :0].reshape(0)], []

    found = refused(empty, mx.ones((4, 3)))
    assert {line.partition(" ")[0] for line in found} == {"Exp", "Concatenate"}


def test_mlx_lms_lora_on_experts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses this gradient, as a run on an H200 showed."""

    def theirs(module: Any, *, rank: int, scale: float, key: mx.array) -> LoRASwitchLinear:
        return LoRASwitchLinear.from_base(module, r=rank, scale=scale)

    monkeypatch.setattr(apply, "LoRAExperts", theirs)
    found = refused_in("gpt_oss", tmp_path / "m", EXECUTIONS["plain"])
    assert found
    assert all(line.startswith("GatherMM in 98304 bytes of shared memory") for line in found)
