"""LoRA on experts in PEFT's layout gives the update that PEFT computes."""

from __future__ import annotations

import numpy as np
import pytest

from mlxtune.backend.adapters.file_formats import peft_experts
from mlxtune.backend.adapters.file_formats.adapter import WeightUpdate

EXPERTS, HIDDEN, WIDTH, RANK = 3, 6, 4, 2
STACK = "model.layers.5.mlp.switch_mlp"


def update(outputs: int, inputs: int, seed: int) -> WeightUpdate:
    rng = np.random.default_rng(seed)
    shapes = ((EXPERTS, RANK, inputs), (EXPERTS, outputs, RANK))
    return WeightUpdate(*(rng.standard_normal(shape).astype(np.float32) for shape in shapes))


def delta(each: WeightUpdate) -> np.ndarray:
    return each.b @ each.a


def pefts_delta(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return PEFT's update (experts, out, in), as in ParamWrapper.get_delta_weight."""
    a = a.reshape(EXPERTS, -1, a.shape[-1])
    return np.einsum("o r e, e r i -> e o i", b.reshape(b.shape[0], -1, EXPERTS), a)


@pytest.mark.parametrize("left_out", ["", "gate_proj", "up_proj"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_peft_computes_expert_updates_like_transformers(kind: str, left_out: str) -> None:
    named = {"gate_proj": update(WIDTH, HIDDEN, 1), "up_proj": update(WIDTH, HIDDEN, 2)}
    named.pop(left_out, None)
    adapter = {f"{STACK}.{name}": each for name, each in named.items()}
    joined = peft_experts.joined(adapter, kind)[5, "gate_up_proj"]
    found = pefts_delta(*peft_experts.to_matrices(joined))
    order = (slice(0, None, 2), slice(1, None, 2)) if kind == "gpt_oss" else ()
    places = order or (slice(0, WIDTH), slice(WIDTH, None))
    for name, rows in zip(("gate_proj", "up_proj"), places, strict=True):
        expected = delta(named[name]) if name in named else 0
        np.testing.assert_allclose(found[:, rows] - expected, 0, atol=1e-6)
    matrices = peft_experts.to_matrices(joined)
    back = peft_experts.gate_up_and_down(
        "gate_up_proj", peft_experts.from_matrices(*matrices, joined.rank), kind
    )
    for name, each in named.items():
        np.testing.assert_array_equal(back[name].a, each.a)
        np.testing.assert_array_equal(back[name].b, each.b)


def test_first_of_two_parameters_is_the_inner_one() -> None:
    both = peft_experts.wrapped("experts", ["down_proj", "gate_up_proj"])
    assert both == {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}
    assert peft_experts.wrapped("experts", ["down_proj"]) == {"down_proj": "experts"}


def test_stacks_differ_from_shared_experts_and_dense_layers() -> None:
    names = [f"{STACK}.down_proj", "model.layers.5.mlp.shared_experts.down_proj"]
    assert peft_experts.stacks([*names, "model.layers.0.mlp.down_proj"]) == {
        (5, "down_proj"): f"{STACK}.down_proj"
    }
