"""Projections that share an input are found by a trial, and run as one product."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune.backend.forward.shared_inputs import share_inputs
from mlxtune.backend.lora.lora_layers import DropoutKeys, LoRALinear
from tests.backend.conftest import random_examples
from tests.backend.step.executions import PLAIN, SPLIT, assert_same, computed, fresh, model_folder

WIDTH, OUT, RANK, SCALE = 8, (6, 4, 4), 3, 2.0


def lora(outputs: int, seed: int, rank: int = RANK, dropout: float = 0.0) -> LoRALinear:
    mx.random.seed(seed)
    options = {"key": mx.random.key(seed), "dropout_keys": DropoutKeys(), "salt": seed}
    linear = nn.Linear(WIDTH, outputs, bias=seed == 1)
    linear.freeze()
    return LoRALinear(linear, rank=rank, scale=SCALE, dropout=dropout, **options)


class Layer(nn.Module):
    """Projects an input two or three times; with `apart`, one projection reads a copy of it."""

    def __init__(self, *, apart: bool = False, **options: Any) -> None:
        super().__init__()
        self.q, self.v = (lora(OUT[i], i, **options) for i in (0, 2))
        self.k = nn.Linear(WIDTH, OUT[1])
        self.k.freeze()
        self._apart = apart

    def __call__(self, x: mx.array) -> mx.array:
        q, k, v = self.q(x), self.k(x), self.v(x + 0 if self._apart else x)
        return mx.concatenate([q, k, v], axis=-1)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = [Layer(**options)]
        self.embedding = nn.Embedding(10, WIDTH)
        self.embedding.freeze()

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.layers[0](self.embedding(tokens))


@pytest.mark.parametrize(
    ("options", "members"),
    [
        ({}, 2),
        ({"apart": True}, 1),
        ({"dropout": 0.5}, 0),
        # At this rank, the zeros that pad B would take time.
        ({"rank": 33}, 0),
    ],
    ids=str,
)
def test_projections_are_joined_that_get_one_array_and_add_no_randomness(
    options: dict[str, Any], members: int
) -> None:
    model = Model(**options)
    undo = share_inputs(model)
    layer = model.layers[0]
    assert (0 if layer.q.shared is None else len(layer.q.shared.members)) == members
    assert layer.q.input_dtype == mx.float32
    undo()
    assert layer.q.shared is None
    assert type(layer.k) is nn.Linear


def test_model_that_takes_more_than_tokens_is_left_alone() -> None:
    class Other(Model):
        def __call__(self, tokens: mx.array, images: mx.array) -> mx.array:  # type: ignore[override]
            return super().__call__(tokens + images)

    model = Other()
    share_inputs(model)
    assert model.layers[0].q.shared is None


def test_outputs_and_gradients_equal_the_formula() -> None:
    model = Model()
    share_inputs(model)
    layer = model.layers[0]
    rng = np.random.default_rng(0)
    x, a = rng.standard_normal((2, 5, WIDTH)), rng.standard_normal((WIDTH, 2 * RANK))
    bs = [rng.standard_normal((RANK, OUT[0])), rng.standard_normal((RANK, OUT[2]))]
    cotangent = rng.standard_normal((2, 5, sum(OUT)))
    q, k, v = (np.array(m.weight, float) for m in (layer.q.linear, layer.k, layer.v.linear))

    def run(x: mx.array, a: mx.array, q: mx.array, v: mx.array) -> list[mx.array]:
        layer.q.lora_a, layer.q.lora_b, layer.v.lora_b = a, q, v
        return [layer(x)]

    above = np.concatenate([bs[0], np.zeros_like(bs[0])])
    below = np.concatenate([np.zeros_like(bs[1]), bs[1]])
    given = [mx.array(each, mx.float32) for each in (x, a, above, below)]
    (y,), found = mx.vjp(run, given, [mx.array(cotangent, mx.float32)])

    whole = [q.T + SCALE * a[:, :RANK] @ bs[0], k.T, v.T + SCALE * a[:, RANK:] @ bs[1]]
    biases = np.concatenate(
        [
            np.array(m["bias"]) if "bias" in m else np.zeros(n)
            for m, n in zip((layer.q.linear, layer.k, layer.v.linear), OUT, strict=True)
        ]
    )
    np.testing.assert_allclose(np.array(y), x @ np.concatenate(whole, 1) + biases, atol=1e-4)
    flat_x, flat = x.reshape(-1, WIDTH), cotangent.reshape(-1, sum(OUT))
    parts = flat[:, : OUT[0]], flat[:, sum(OUT[:2]) :]
    d_a = [SCALE * flat_x.T @ c @ b.T for c, b in zip(parts, bs, strict=True)]
    halves = a[:, :RANK], a[:, RANK:]
    d_b = [SCALE * (flat_x @ half).T @ c for half, c in zip(halves, parts, strict=True)]
    for one, expected in (
        (found[0], cotangent @ np.concatenate(whole, 1).T),
        (found[1], np.concatenate(d_a, 1)),
        (found[2][:RANK], d_b[0]),
        (found[3][RANK:], d_b[1]),
    ):
        np.testing.assert_allclose(np.array(one), expected, atol=2e-4)


@pytest.mark.parametrize("quantize", [None, 4])
def test_frozen_projections_between_do_not_change_the_gradients(quantize: int | None) -> None:
    folder = model_folder("qwen3", quantize)
    options = {"targets": ("q_proj", "v_proj", "down_proj")}
    plain, joined = (fresh(folder, how, 1_000, **options) for how in (PLAIN, SPLIT))
    assert joined.model.layers[0].self_attn.q_proj.shared is not None
    assert_same(computed(joined, random_examples()), computed(plain, random_examples()))
