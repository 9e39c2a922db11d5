"""Each way of computing a step with LoRA's family, against the plain path."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.lora.apply import adapted_modules
from tests.backend.step.executions import (
    WAYS,
    assert_same,
    computed,
    fixed_step,
    pipeline,
    plain_step,
)
from tests.slow import long, slow

FAMILY: dict[str, dict[str, Any]] = {
    "DoRA": {"dora": True},
    "DoRA with dropout": {"dora": True, "dropout": 0.3},
    "PiSSA": {"init": "pissa"},
    "PiSSA with dropout": {"init": "pissa", "dropout": 0.3},
    "ranks": {"dora": True, "rslora": True, "target_rank": ("q_proj=2", "1.mlp.down_proj=7")},
}
# Qwen2 has biases on q, k and v.
MODELS = ("qwen2", "gemma3_text")


FEW = ("packed with recompute", "cpu kernels, packed", "all")


@pytest.mark.parametrize(
    ("member", "way"),
    [("DoRA", way) if way in FEW else slow("DoRA", way) for way in WAYS]
    + [("DoRA with dropout", "all"), ("PiSSA", "all"), ("ranks", "all")]
    + [slow(member, FEW[0]) for member in FAMILY if member != "DoRA"]
    + [long(member, way) for member in FAMILY if member != "DoRA" for way in FEW[1:]],
)
def test_step_equals_the_plain_one(member: str, way: str) -> None:
    options = FAMILY[member]
    for model in MODELS if way in FEW else MODELS[:1]:
        fast = pipeline(model, WAYS[way], tokens=10_000, **options)
        found = computed(fast, fixed_step())
        assert_same(found, plain_step(model, **options))
        if "dora" in options:
            assert min(np.abs(v).max() for k, v in found.gradients.items() if k[-2:] == ".m") > 1e-6


@pytest.mark.parametrize("way", [slow("packed with recompute"), slow("cpu kernels"), "all"])
@pytest.mark.parametrize("member", ["DoRA", "PiSSA"])
def test_quantized_step_equals_the_plain_one(member: str, way: str) -> None:
    options = FAMILY[member]
    fast = pipeline("qwen2", WAYS[way], tokens=10_000, quantize=4, **options)
    assert_same(computed(fast, fixed_step()), plain_step("qwen2", quantize=4, **options))


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("down_proj",), ("up_proj", "k_proj")])
def test_dora_on_some_targets_equals_the_plain_one(targets: tuple[str, ...]) -> None:
    options = {"dora": True, "targets": targets}
    fast = pipeline("qwen2", WAYS["all"], tokens=10_000, **options)
    for _ in range(2):  # the second step knows what the backward pass reads
        assert_same(computed(fast, fixed_step()), plain_step("qwen2", **options))


def test_weight_is_dequantized_for_its_norm_and_no_copy_is_kept() -> None:
    made = pipeline("qwen2", quantize=4, dora=True)
    for name, module in adapted_modules(made.model).items():
        linear = module.linear
        weight = np.array(
            mx.dequantize(
                linear.weight, linear.scales, linear.biases, linear.group_size, linear.bits
            )
        )
        a, b = np.array(module.lora_a), np.array(module.lora_b)
        expected = np.linalg.norm(weight + module.scale * (a @ b).T, axis=1)
        np.testing.assert_allclose(np.array(module.norm()), expected, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(np.array(module.m), np.linalg.norm(weight, axis=1), rtol=1e-6)
        held = sum(x.size for x in vars(module).values() if isinstance(x, mx.array))
        held += sum(x.size for x in module.values() if isinstance(x, mx.array))
        assert held == a.size + b.size + 2 * len(weight)
