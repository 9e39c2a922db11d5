"""Interrupted and resumed runs of LoRA's family take the same steps as uninterrupted runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from mlxtune.backend.adapters import checkpoint_tensors, initialize
from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.run.checkpoint import PARAMETERS
from mlxtune.core.steps.execution import Execution
from mlxtune.errors import ModelError
from tests.backend.step.test_pipeline_resume import STEPS, STOP, state, take
from tests.models import write_model
from tests.slow import slow

FAMILY: dict[str, dict[str, Any]] = {
    "DoRA": {"dora": True, "dropout": 0.1},
    "LoRA+": {"lr_ratio": 4.0, "rslora": True},
    "PiSSA": {"init": "pissa", "dropout": 0.1},
    "PiSSA with ranks": {"init": "pissa_niter_2", "target_rank": ("q_proj=2",)},
    "all": {"dora": True, "rslora": True, "lr_ratio": 4.0, "target_rank": ("q_proj=2",)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("resume") / "qwen3", "qwen3")


def pipeline(folder: Path, how: Execution, *, fresh: bool = True, **options: Any) -> Any:
    config = InstructConfig(**{"lora_rank": 4, "targets": ("q_proj", "down_proj"), **options})
    model = load_base(folder, "float32").model
    return InstructPipeline(
        model, config, execution=replace(how, micro_batch_tokens=60), fresh=fresh
    )


@pytest.mark.parametrize(
    ("member", "how"),
    [
        *((member, Execution(MLX)) for member in ("PiSSA with ranks", "all")),
        *(slow(member, Execution(MLX)) for member in ("DoRA", "LoRA+", "PiSSA")),
        *(("PiSSA", Execution(CPU)), slow("all", Execution(CPU))),
    ],
)
def test_restored_pipeline_takes_the_same_steps_to_the_last_bit(
    folder: Path, tmp_path: Path, member: str, how: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FAMILY[member]
    whole = pipeline(folder, how, **options)
    expected = take(whole, range(1, STEPS + 1))

    first = pipeline(folder, how, **options)
    assert take(first, range(1, STOP + 1)) == expected[:STOP]
    first.snapshot()(tmp_path)

    # The initial matrices must be read from the checkpoint: computing them would fail.
    monkeypatch.setattr(initialize, "principal_svd", None)
    again = pipeline(folder, how, fresh=False, **options)
    again.restore(tmp_path)
    assert take(again, range(STOP + 1, STEPS + 1)) == expected[STOP:]
    assert state(again) == state(whole)
    for made, name in ((whole, "whole"), (again, "again")):
        (tmp_path / name).mkdir()
        made.write(tmp_path / name / "adapters.safetensors")
    for file in ("adapters.safetensors", "adapter_config.json"):
        written = [(tmp_path / name / file).read_bytes() for name in ("whole", "again")]
        assert written[0] == written[1]


@pytest.mark.parametrize("member", ["PiSSA with ranks", "all", "DoRA"])
def test_snapshot_is_checked_against_the_model_before_any_weight_is_read(
    folder: Path, tmp_path: Path, member: str
) -> None:
    made = pipeline(folder, Execution(MLX), **FAMILY[member])
    made.snapshot()(tmp_path)
    weights = tmp_path / "adapters.safetensors"
    count = len(safetensors.numpy.load_file(weights))
    assert checkpoint_tensors.check_tensors_fit(weights, made.model, made.lora) == count
    other = pipeline(folder, Execution(MLX), **FAMILY[member] | {"lora_rank": 3})
    with pytest.raises(ModelError, match="does not fit the model"):
        checkpoint_tensors.check_tensors_fit(weights, other.model, other.lora)
    path = tmp_path / PARAMETERS
    assert path.exists() == ("ranks" in member or member == "all")
    if path.exists():
        tensors = safetensors.numpy.load_file(path)
        name = next(iter(tensors))
        del tensors[name]
        safetensors.numpy.save_file(tensors, path)
        with pytest.raises(ModelError, match=f"{name} is missing"):
            checkpoint_tensors.check_tensors_fit(weights, made.model, made.lora)
