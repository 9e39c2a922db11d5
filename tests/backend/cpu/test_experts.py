"""Experts by one product each, against mlx-lm's own layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchMLP
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlxtune.backend.cpu.model import make_fast
from tests.backend.cpu.compared import assert_same_function, random

WIDTH, HIDDEN = 64, 32


def experts(
    kind: Any = SwitchGLU, count: int = 5, activation: Any = None, *, bias: bool = False
) -> nn.Module:
    given = {} if activation is None else {"activation": activation}
    made = kind(WIDTH, HIDDEN, count, bias=bias, **given)
    names = tree_flatten(made.parameters())
    made.update(tree_unflatten([(name, random(*x.shape, scale=0.2)) for name, x in names]))
    made.freeze()
    return made


def with_lora(made: nn.Module, *names: str) -> nn.Module:
    for seed, name in enumerate(names):
        layer = LoRASwitchLinear.from_base(made[name], r=3, scale=2.0)
        layer.lora_b = random(*layer.lora_b.shape, seed=seed)
        made[name] = layer
    return made


def indices(tokens: int, per_token: int, count: int, seed: int = 0) -> mx.array:
    """Return different experts for each token, as top-k gives them: (1, tokens, per_token)."""
    order = np.random.default_rng(seed).random((1, tokens, count)).argsort(axis=-1)
    return mx.array(order[..., :per_token].astype(np.uint32))


def assert_same(made: nn.Module, chosen: mx.array) -> None:
    names = [name for name, _ in tree_flatten(made.trainable_parameters())]
    trained = [value for _, value in tree_flatten(made.trainable_parameters())]

    def function(x: mx.array, *values: mx.array) -> mx.array:
        made.update(tree_unflatten(list(zip(names, values, strict=True))))
        return made(x, chosen)

    def fast(*arrays: mx.array) -> mx.array:
        undo = make_fast(made)
        try:
            return function(*arrays)
        finally:
            undo()

    x = random(*chosen.shape[:-1], WIDTH)
    assert_same_function(fast, function, x, *trained, tolerance=1e-5)


@settings(max_examples=25, deadline=None)
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
    assert_same(experts(count=count, bias=bias), chosen)


def test_all_tokens_may_go_to_one_expert() -> None:
    assert_same(experts(), mx.full((1, 70, 1), 3, dtype=mx.uint32))


@pytest.mark.parametrize("activation", [SwiGLU(), SwigluOAI(), GeGLU(), nn.GELU()])
def test_each_activation(activation: Any) -> None:
    kind = SwitchMLP if isinstance(activation, nn.GELU) else SwitchGLU
    assert_same(experts(kind, activation=activation, bias=True), indices(40, 2, 5))


@pytest.mark.parametrize("names", [("up_proj",), ("gate_proj", "down_proj")])
def test_lora_on_experts_gets_its_gradients(names: tuple[str, ...]) -> None:
    # Experts that get no tokens get gradients of zero.
    assert_same(with_lora(experts(count=9, bias=True), *names), indices(4, 2, 9))


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])
def test_quantised_experts(bits: int, mode: str) -> None:
    made = experts(bias=True)
    nn.quantize(made, group_size=32, bits=bits, mode=mode)
    made.freeze()
    assert_same(with_lora(made, "down_proj"), indices(40, 2, 5))


def test_the_activation_that_all_models_share_stays_as_it_is() -> None:
    made = experts()
    make_fast(made)
    assert type(made.activation) is SwiGLU
