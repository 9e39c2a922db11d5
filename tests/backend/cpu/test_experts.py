"""Experts by one product each, against mlx-lm's own layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchMLP

from mlxtune.backend.cpu.model import make_fast
from mlxtune.backend.models.layers import StoredExperts
from tests.backend.switched import assert_same, experts, indices, with_lora


@given(
    tokens=st.integers(1, 90),
    count=st.integers(1, 7),
    per_token=st.integers(1, 7),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_tokens_go_to_any_experts(
    tokens: int, count: int, per_token: int, bias: bool, seed: int
) -> None:
    chosen = indices(tokens, min(per_token, count), count, seed)
    assert_same(experts(count=count, bias=bias), chosen, make_fast)


def test_all_tokens_may_go_to_one_expert() -> None:
    assert_same(experts(), mx.full((1, 70, 1), 3, dtype=mx.uint32), make_fast)


@pytest.mark.parametrize("activation", [SwiGLU(), SwigluOAI(), GeGLU(), nn.GELU()])
def test_each_activation(activation: Any) -> None:
    kind = SwitchMLP if isinstance(activation, nn.GELU) else SwitchGLU
    assert_same(experts(kind, activation=activation, bias=True), indices(40, 2, 5), make_fast)


@pytest.mark.parametrize("names", [("up_proj",), ("gate_proj", "down_proj")])
def test_lora_on_experts_gets_its_gradients(names: tuple[str, ...]) -> None:
    # Experts that get no tokens get gradients of zero.
    assert_same(with_lora(experts(count=9, bias=True), *names), indices(4, 2, 9), make_fast)


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])
def test_quantised_experts(bits: int, mode: str) -> None:
    made = experts(bias=True)
    nn.quantize(made, group_size=32, bits=bits, mode=mode)
    made.freeze()
    assert_same(with_lora(made, "down_proj"), indices(40, 2, 5), make_fast)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_experts_stored_in_16_bits(dtype: mx.Dtype) -> None:
    made = experts(bias=True)
    for name, layer in made.children().items():
        if name != "activation":
            layer.weight = layer.weight.astype(dtype)
            made[name] = StoredExperts(layer)
    made.freeze()
    assert_same(with_lora(made, "up_proj"), indices(40, 2, 5), make_fast)


def test_the_activation_that_all_models_share_stays_as_it_is() -> None:
    made = experts()
    make_fast(made)
    assert type(made.activation) is SwiGLU
