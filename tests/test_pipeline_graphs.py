"""The matrix products and launches in the graphs of mlxtune's steps, against formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.rounding import NOT_ROUNDED
from tests.benchmark.test_peers import examples
from tests.long.counts import StepCounts, count_steps, counted_evaluations, kernels_of_a_gpu
from tests.long.pipeline_graphs import PipelineGraphs
from tests.models import VOCAB_SIZE, write_model
from tests.slow import compiled, slow

# The sizes of tests/models.py.
HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, RANK = 64, 96, 4, 2, 16, 4
OUTPUT = HIDDEN * HEADS * WIDTH
ATTENTION = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS)
MLP = 3 * HIDDEN * INNER
Q_AND_V = HEADS * WIDTH + KV_HEADS * WIDTH
STEP = examples()
# The number of tokens that run in each example: all before its last supervised token.
RUNS = [int(each.assistant_mask.nonzero()[0][-1]) for each in STEP]
T, SUPERVISED = sum(RUNS), sum(each.supervised for each in STEP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("graphs") / "m", "qwen3", num_hidden_layers=1)


def pipeline(folder: Path, dtype: str = "float32", **changes: Any) -> InstructPipeline:
    # A device may round lengths up.
    exact = replace(best_execution(0, kind="gpu"), rounding=NOT_ROUNDED)
    execution = replace(exact, **changes)
    config = InstructConfig(lora_rank=RANK, targets=("q_proj", "v_proj"))
    return InstructPipeline(load_base(folder, dtype).model, config, execution=execution)


def counted(folder: Path, steps: list[list[Example]] | None = None, **changes: Any) -> StepCounts:
    return count_steps(PipelineGraphs(pipeline(folder, **changes)), steps or [STEP])


def test_products_of_a_layer_cover_real_tokens(folder: Path) -> None:
    found = counted(folder)
    head = 2 * 2 * SUPERVISED * HIDDEN * VOCAB_SIZE
    forward, backward = 2 * T * (ATTENTION + MLP), 2 * T * (MLP + OUTPUT)
    # LoRA's products: forward, for its own gradients, and for the gradient of A's output.
    lora = 2 * T * RANK * (2 * 2 * HIDDEN + 3 * Q_AND_V)
    assert found.matmul_flops == head + forward + backward + lora
    # Examples are padded to the longest. Attention has two products forward, and three for the
    # gradients of queries and values; keys need no gradient.
    assert found.attention_flops == 5 * 2 * HEADS * WIDTH * len(STEP) * max(RUNS) ** 2


def test_layer_that_runs_again_is_counted_again(folder: Path) -> None:
    once, again = counted(folder), counted(folder, recompute=True)
    # The layer runs again without its last product, which the backward pass does not read.
    forward = 2 * T * (ATTENTION + MLP - HIDDEN * INNER)
    lora = 2 * T * RANK * (2 * HIDDEN + Q_AND_V)
    # The gradient of the first layer's inputs is computed, as the layer's other gradients depend on
    # it.
    inputs = 2 * T * (ATTENTION - OUTPUT + RANK * 2 * HIDDEN)
    assert again.matmul_flops - once.matmul_flops == forward + lora + inputs
    assert again.attention_flops / once.attention_flops == 8 / 5
    # These are six products of the layer, three of LoRA, and four for the gradient of the inputs.
    matmuls = [each.launches["Matmul"] + each.launches["AddMM"] for each in (once, again)]
    assert matmuls[1] - matmuls[0] == 13


@compiled
@pytest.mark.parametrize(
    ("targets", "most"), [(("all",), 2_935), slow(("q_proj", "v_proj"), 1_780)], ids=str
)
def test_step_of_36_layers_launches_few_kernels(
    tmp_path: Path, targets: tuple[str, ...], most: int
) -> None:
    def launched(layers: int) -> int:
        folder = write_model(tmp_path / f"{layers}", "qwen3", num_hidden_layers=layers)
        base = load_base(folder, "bfloat16")
        config = InstructConfig(lora_rank=8, targets=targets)
        with kernels_of_a_gpu():
            made = InstructPipeline(base.model, config, execution=best_execution(0, kind="gpu"))
        launches = count_steps(PipelineGraphs(made), [STEP]).launches
        assert launches is not None
        return launches.total()

    two, four = launched(2), launched(4)
    # Each layer adds the same number of launches.
    assert two + (36 - 2) * (four - two) / 2 <= most


def test_smaller_micro_batches_launch_more_for_the_same_products(folder: Path) -> None:
    whole, parts = counted(folder), counted(folder, micro_batch_tokens=70)
    assert parts.matmul_flops == whole.matmul_flops
    assert parts.attention_flops < whole.attention_flops
    assert parts.launches.total() > 1.5 * whole.launches.total()


def test_head_is_part_of_the_launches(folder: Path) -> None:
    whole, chunks = (counted(folder, dtype="bfloat16", loss_chunk=n) for n in (256, 16))
    assert 0 < whole.head_launches < whole.launches.total()
    # Further chunks add launches only in the head.
    assert chunks.head_launches > 2 * whole.head_launches
    assert chunks.launches.total() - chunks.head_launches == pytest.approx(
        whole.launches.total() - whole.head_launches, abs=4
    )
    assert counted(folder, separate_head=False).head_launches == 0


def test_step_is_one_evaluation(folder: Path) -> None:
    side = pipeline(folder)
    with counted_evaluations() as evaluations:
        side.train_batch(STEP)
    assert evaluations == [1]


def test_steps_after_counting_match_uncounted_steps(folder: Path) -> None:
    one, other = pipeline(folder), pipeline(folder)
    count_steps(PipelineGraphs(one), [STEP])
    losses = [[side.train_batch(STEP).avg_loss for _ in range(3)] for side in (one, other)]
    assert losses[0] == losses[1]
