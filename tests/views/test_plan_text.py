"""A plan as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mlxtune.config import TrainConfig
from mlxtune.core.data.inspection import TruncationReport
from mlxtune.core.run.run_plan import LongestFit, RunPlan, Speed
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_plan import MemoryPlan
from mlxtune.core.steps.memory_terms import MemoryCorrection, Prediction
from mlxtune.core.steps.scaling import Scaling
from mlxtune.views.plan_text import (
    few_steps_line,
    free_line,
    large_rate_line,
    larger_limit_line,
    micro_batches_line,
    peak_line,
    plan_lines,
    truncated_line,
)
from tests.core.steps.shapes import shapes

MEMORY = MemoryPlan(
    shapes=shapes(),
    execution=Execution(None, 256),
    peak=Prediction(1_200_000_000, 20_000_000, 400_000_000, 80_000_000),
    limit=24_000_000_000,
    estimate=1_700_000_000,
    time=1.0,
    micro_batches_per_step=2.1,
    padding_fraction=0.03,
    forward_fraction=0.8,
)
RECOMPUTED = replace(MEMORY, execution=Execution(None, 256, recompute=True))
RUN = RunPlan(
    *("qwen3, 28 layers", "float32", "AMD EPYC (cpu)", 512, MEMORY),
    **{"rows": 80, "steps_per_epoch": 20, "steps": 60, "tokens": 9000, "supervised": 2000},
    all_tokens=27_000,
    lora="rank 8 on q_proj",
    trainable_parameters=4096,
    expert_matrices=12,
)
SPEED = Speed(37.5, "2026-03-04")


def text(plan: RunPlan) -> str:
    return "\n".join(f"{name}: {line}" for name, line in plan_lines(plan))


def test_micro_batches_and_peak_take_a_line_each() -> None:
    assert micro_batches_line(MEMORY) == (
        "micro-batches of up to 256 tokens, 2.1 a step with 3.0% padding; activations kept"
    )
    alone = replace(MEMORY, execution=Execution(None, 1))
    assert micro_batches_line(alone).startswith("micro-batches of one example, 2.1 a step")
    assert "recomputed" in micro_batches_line(RECOMPUTED)
    assert peak_line(MEMORY) == "estimated peak memory 1.7 GB (1.21 GB to 2.43 GB) of 24 GB"
    measured = replace(MEMORY, shapes=shapes(measured=MemoryCorrection()))
    assert peak_line(measured) == "predicted peak memory 1.7 GB of 24 GB"


def test_larger_limit_is_named_with_its_gain() -> None:
    # A peak of 1.9 GB with the margin of 15% needs 2.185 GB, so the limit is rounded up to 3.
    peak = replace(MEMORY.peak, weights=1_400_000_000)
    wide = replace(MEMORY, execution=Execution(None, 8192), peak=peak)
    longer = "run micro-batches of up to 8,192 tokens"
    kept = "without recomputing activations, which takes 25 to 33% of a step"
    assert larger_limit_line(RECOMPUTED, wide, 64) == (
        f"the device has 64 GB: --memory-limit 3 would {longer} {kept}"
    )
    assert larger_limit_line(MEMORY, wide, 64).endswith(f"would {longer}")
    assert larger_limit_line(RECOMPUTED, MEMORY, 64).endswith(f"would run {kept}")
    assert "--memory-limit 1 would" in larger_limit_line(RECOMPUTED, MEMORY, 1)
    assert larger_limit_line(MEMORY, replace(MEMORY, limit=64_000_000_000), 64) == ""
    assert larger_limit_line(wide, MEMORY, 64) == ""


@pytest.mark.parametrize(
    ("free", "line"),
    [
        (None, ""),
        (64 * 10**9, "64 GB free now, enough for this run"),
        (10 * 10**9, "10 GB free now, enough for this run"),
        (10**9, "only 1 GB free now: close other programs, or plan for less memory"),
    ],
)
def test_plan_is_compared_with_the_free_memory(free: int | None, line: str) -> None:
    assert free_line(MEMORY, free) == line
    assert line in text(replace(RUN, free_memory=free))


def test_cut_of_supervised_tokens_names_a_limit_and_its_memory() -> None:
    assert truncated_line(TruncationReport(0.123, 2048), 512, 3_200_000_000) == (
        "--max-seq-len 512 cuts off 12% of the supervised tokens: --max-seq-len 2048 keeps 99% of "
        "them, in 3.2 GB"
    )
    assert truncated_line(TruncationReport(0.123, 2048, 120), 512, None).startswith(
        "--max-seq-len 512 skips 120 preference rows with 12% of the supervised tokens: --max-seq"
    )
    assert truncated_line(TruncationReport(0.123, 2048), 512, None).endswith(
        "does not fit into --memory-limit"
    )


def test_too_few_steps_are_warned_of_with_enough_epochs_steps_or_rows() -> None:
    line = "29 steps are too few to learn from: --epochs 4 gives 116 steps"
    assert few_steps_line(29, 29, None) == few_steps_line(29, 29, 30) == line
    assert few_steps_line(29, 40, 29).endswith("learn from: use --max-steps 100 or more")
    assert few_steps_line(30, 30, None) == ""
    assert line in text(replace(RUN, few_steps=line))
    auto = TrainConfig("model", ("data",), epochs=3)
    assert few_steps_line(2, 1, None, auto) == (
        "2 steps, as there is too little data to learn from: 100 steps in 3 "
        "epochs take 136 training rows"
    )
    assert few_steps_line(2, 1, 2, auto).startswith("2 steps are too few to learn from: use")


def test_rate_far_above_the_usual_is_warned_of() -> None:
    assert large_rate_line(5e-3) == ""
    assert large_rate_line(5.0).startswith("--lr 5 is far above the usual 0.0001: ")


WORKERS = Scaling(4, 10.0, 0.3, 12_500_000)
SHARE = "the busiest worker computes up to 30% of a step"
EXCHANGE = "adding 12.5 MB of gradients takes 15.6 ms at 10 Gbit/s"


KEPT = "tokens with activations kept"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "weights        1.2 GB"),
        ({}, "optimizer       20 MB"),
        ({}, "head            80 MB"),
        ({}, "80 training rows: 9,000 tokens, 2,000 of them supervised"),
        ({}, "the model processes 80% of that number, padding included"),
        ({}, "60 steps, 20 per epoch"),
        ({}, "Time: unknown until a first run"),
        ({"speed": SPEED}, "about 12m 00s at 38 tokens/s measured on 2026-03-04"),
        ({"scaling": WORKERS}, f"Workers: 4: {SHARE}; {EXCHANGE}"),
        ({"scaling": replace(WORKERS, step_s=12.0)}, "4, at most 3.3 times as fast as one alone: "),
        ({"scaling": replace(WORKERS, step_s=12.0)}, f"alone: {SHARE} of 12 s; {EXCHANGE}"),
        (
            {"scaling": replace(WORKERS, step_s=0.02)},
            "slower than one alone: only steps of over 22",
        ),
        ({"longest": LongestFit(0, 0, 4096)}, "not even one token fits: raise --memory-limit"),
        ({"longest": LongestFit(0, 96, 4096)}, "no example with activations kept; 96 with --grad"),
        ({"longest": LongestFit(1500, 2900, 4096)}, f"1,500 {KEPT}; 2,900 with --grad-checkpoint"),
        ({"longest": LongestFit(1500, 4096, 4096)}, "on, the model's maximum: use"),
        ({"longest": LongestFit(4096, 4096, 4096)}, f"4,096 {KEPT}, the model's maximum: use"),
    ],
)
def test_part_of_a_plan_has_its_line(changes: dict[str, Any], line: str) -> None:
    assert line in text(replace(RUN, **changes))


def test_without_data_only_memory_is_planned() -> None:
    bare = RunPlan("qwen3", "float32", "cpu", 2048, replace(MEMORY, micro_batches_per_step=0.0))
    assert "for one example of 2,048 tokens" in text(bare)
    assert "Time" not in text(bare)
    assert bare.as_dict()["data"] is None


def test_json_has_the_same_numbers() -> None:
    found = json.loads(json.dumps(RUN.as_dict()))
    assert found["memory"]["peak"] == 1_700_000_000
    assert found["memory"]["activations"] == 400_000_000
    assert found["measured"] is False
    assert found["data"]["steps"] == 60
    assert found["data"]["padding_share"] == 0.03
    assert found["seconds"] is None
    assert found["longest"] is None
    fits = replace(RUN, longest=LongestFit(0, 96, 4096)).as_dict()["longest"]
    assert fits == {"kept": 0, "recomputed": 96, "context": 4096}
    # 4 workers exchange 12.5 MB in 15.6 ms at 10 Gbit/s, in 6 messages.
    gain = 12 / (0.3 * 12 + 0.0156)
    assert replace(RUN, speed=SPEED).seconds == 720.0
    timed = replace(RUN, speed=SPEED, scaling=replace(WORKERS, step_s=12.0))
    assert timed.seconds == pytest.approx(720 / gain)
    assert timed.as_dict()["workers"]["speedup"] == pytest.approx(gain)
