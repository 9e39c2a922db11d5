"""Architectures against mlx-lm's trainer on tiny models, and the page of docs/models.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.backend.models.loading import open_base
from mlxtune.benchmark.bench_helper import OURS, Job, run_job
from mlxtune.benchmark.peers import write_start
from mlxtune.config import TrainConfig
from tests.backend.step.executions import fixed_step
from tests.long import models_table
from tests.long.architectures import ARCHITECTURES
from tests.long.models_page import page
from tests.models import write_model
from tests.paths import DOCS
from tests.slow import long_except

TEN = (
    *("qwen3", "qwen3_moe", "qwen3_5", "gemma3_text", "gemma4_text"),
    *("gpt_oss", "lfm2", "granitemoehybrid", "mamba2", "deepseek_v3"),
)


@pytest.mark.parametrize("name", long_except(TEN, "qwen3_moe"))
def test_architecture_trains_with_the_loss_of_mlx_lms_trainer(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", name, **ARCHITECTURES[name])
    config = TrainConfig(str(folder), ("x",), dtype="float32", targets=("all",), max_grad_norm=0)
    write_start(open_base(folder, "float32"), config.pipeline_config(), tmp_path / "adapter")
    step = fixed_step()
    losses = []
    for side in (OURS, "mlx-lm"):
        # The second step's loss shows that the first step changed both adapters equally.
        job = Job(side, folder, config, tmp_path / "adapter", [step, step], 2 * len(step), "auto")
        *steps, _ = run_job(job)
        losses.append([each["step"]["loss"] for each in steps])
    ours, theirs = losses
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[1] < ours[0]


def test_docs_page_shows_the_recorded_models() -> None:
    records = models_table.read_records(models_table.RECORDS)
    assert (DOCS / "models.md").read_text(encoding="utf-8") == page(records)


@pytest.mark.slow
def test_only_dense_models_get_kernels(
    tmp_path: Path,
) -> None:
    kernels = {
        name: models_table.describe(name, tmp_path / name)["gets"]["layerwise"]
        for name in ("qwen3", "hunyuan", "mamba2")
    }
    assert kernels == {"qwen3": True, "hunyuan": False, "mamba2": False}
