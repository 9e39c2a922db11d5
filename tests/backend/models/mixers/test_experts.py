"""Experts with sorted tokens, whose gradients use gathers, against mlx-lm's own layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchMLP

from mlxtune.backend.models.mixers.replacements import MIXERS
from tests.backend.cpu.compared import random
from tests.backend.switched import WIDTH, assert_same, experts, indices, with_lora
from tests.long.counts import launches


@settings(max_examples=15, deadline=None)
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
    assert_same(experts(count=count, bias=bias), chosen, MIXERS.apply)


@pytest.mark.parametrize("activation", [SwiGLU(), SwigluOAI(), nn.GELU()])
def test_each_kind_of_experts(activation: Any) -> None:
    kind = SwitchMLP if isinstance(activation, nn.GELU) else SwitchGLU
    assert_same(experts(kind, activation=activation, bias=True), indices(40, 2, 5), MIXERS.apply)


def test_quantized_experts_with_lora() -> None:
    made = experts(bias=True)
    nn.quantize(made, group_size=32, bits=4)
    made.freeze()
    # Some experts get no tokens, so their gradients are zero.
    made = with_lora(made, "gate_proj", "down_proj")
    assert_same(made, indices(40, 2, 5) // 2, MIXERS.apply)


def test_no_gradient_is_added_up_in_any_order() -> None:
    made = experts()
    MIXERS.apply(made)
    chosen, x = indices(40, 3, 5), random(1, 40, WIDTH)
    _, gradients = mx.vjp(lambda x: made(x, chosen), [x], [random(1, 40, 3, WIDTH)])
    assert not [name for name in launches(gradients) if "Scatter" in name]
