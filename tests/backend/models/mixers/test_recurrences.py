"""Mamba 2's recurrence and its gradients, against the formula and mlx-lm's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import ssm

from mlxtune.backend.models.mixers import recurrences
from tests.backend.cpu.compared import assert_close, random

Update = Callable[..., tuple[mx.array, mx.array]]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    # On the CPU, mlx-lm's compiled functions would wait for a C++ compiler.
    mx.disable_compile()
    yield
    mx.enable_compile()


def inputs(batch: int, length: int, heads: int, groups: int, *, scale: float = 1.0) -> Any:
    """Return the varied arrays x, B, C, dt and a state, and the frozen A_log, D and dt_bias."""
    varied = [
        random(batch, length, heads, 6),
        random(batch, length, groups, 5, seed=1),
        random(batch, length, groups, 5, seed=2),
        random(batch, length, heads, scale=scale),
        random(batch, heads, 6, 5),
    ]
    return varied, (mx.log(mx.arange(1.0, heads + 1)), random(heads), random(heads, seed=1))


def by_tokens(
    x: Any, A_log: Any, B: Any, C: Any, D: Any, dt: Any, dt_bias: Any, state: Any, limit: Any
) -> tuple[Any, Any]:
    """Return the recurrence's result in float64, by arXiv:2405.21060, equation 1."""
    x, A_log, B, C, D, dt, dt_bias, state = (
        each.astype(mx.float64) for each in (x, A_log, B, C, D, dt, dt_bias, state)
    )
    dt = mx.clip(mx.logaddexp(dt + dt_bias, mx.array(0.0, mx.float64)), *limit)
    heads, ys = x.shape[2] // B.shape[2], []
    for t in range(x.shape[1]):
        b, c = (mx.repeat(each[:, t], heads, axis=1)[:, :, None] for each in (B, C))
        decay = mx.exp(-mx.exp(A_log) * dt[:, t])[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * b
        ys.append((state * c).sum(axis=-1) + D[:, None] * x[:, t])
    return mx.stack(ys, axis=1), state


def results(update: Update, varied: Any, frozen: Any, limit: tuple[float, float]) -> list[Any]:
    """Return y, the last state, and the gradients of a weighted sum of both."""
    A_log, D, dt_bias = frozen
    weights = [random(*varied[i].shape, seed=3) for i in (0, 4)]
    made: list[mx.array] = []

    def loss(x: mx.array, B: mx.array, C: mx.array, dt: mx.array, state: mx.array) -> mx.array:
        made[:] = update(x, A_log, B, C, D, dt, dt_bias, state, limit)
        weighted = [(each * weight).sum() for each, weight in zip(made, weights, strict=True)]
        return sum(weighted, start=mx.array(0.0))

    with mx.stream(mx.cpu):
        gradients = mx.grad(loss, argnums=(0, 1, 2, 3, 4))(*varied)
        outputs = update(varied[0], A_log, *varied[1:3], D, varied[3], dt_bias, varied[4], limit)
        return [np.array(gradient.astype(mx.float64)) for gradient in (*outputs, *gradients)]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.integers(1, 2),
    st.integers(2, 150),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (3, 3)]),
    st.sampled_from([1.0, 8.0]),
)
def test_recurrence_and_its_gradients(
    batch: int, length: int, heads: tuple[int, int], scale: float
) -> None:
    varied, frozen = inputs(batch, length, *heads, scale=scale)
    wanted = results(by_tokens, varied, frozen, (0.001, 100.0))
    found = results(recurrences.ssm_update, varied, frozen, (0.001, 100.0))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 2e-6)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.5, 0.9)])
def test_result_is_mlx_lms(limit: tuple[float, float]) -> None:
    # Longer than a chunk in mlx-lm.
    varied, frozen = inputs(2, 300, 4, 2)
    for one, other in zip(
        results(recurrences.ssm_update, varied, frozen, limit),
        results(ssm.ssm_update, varied, frozen, limit),
        strict=True,
    ):
        assert_close(one, other, 2e-6)


def test_blocks_continue_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    varied, frozen = inputs(2, 200, 4, 2)
    whole = results(recurrences.ssm_update, varied, frozen, (0.001, 100.0))
    monkeypatch.setattr(recurrences, "_MAMBA_BLOCK", 70)
    found = results(recurrences.ssm_update, varied, frozen, (0.001, 100.0))
    for one, other in zip(found, whole, strict=True):
        assert_close(one, other, 1e-6)


def test_decays_to_nothing_and_to_all_are_exact() -> None:
    varied, frozen = inputs(1, 80, 2, 1)
    # Some tokens erase the state, others keep it unchanged.
    varied[3] = mx.where(mx.arange(80)[:, None] % 7 == 0, 1e4, -1e4) + 0 * varied[3]
    limit = (0.0, float("inf"))
    found = results(recurrences.ssm_update, varied, frozen, limit)
    for one, other in zip(found, results(by_tokens, varied, frozen, limit), strict=True):
        assert_close(one, other, 2e-6)


def test_masks_lengths_and_single_tokens_are_left_to_mlx_lm() -> None:
    (x, B, C, dt, state), (A_log, D, dt_bias) = inputs(2, 9, 4, 2)
    mask = mx.arange(9)[None] >= mx.array([[0], [3]])
    lengths = mx.array([9, 5])
    for length, options in [
        (9, {"mask": mask}),
        (9, {"mask": mask[:, ::-1], "lengths": lengths}),
        (1, {}),
    ]:
        x_, B_, C_, dt_ = (each[:, :length] for each in (x, B, C, dt))
        given = x_, A_log, B_, C_, D, dt_, dt_bias, state
        wanted = ssm.ssm_update(*given, **options)
        found = recurrences.ssm_update(*given, **options)
        assert all(mx.array_equal(*each) for each in zip(found, wanted, strict=True))


def test_16_bits_are_computed_in_float32() -> None:
    varied, (A_log, D, dt_bias) = inputs(1, 100, 4, 2)
    x, B, C, dt, _ = (each.astype(mx.bfloat16) for each in varied)
    y, state = recurrences.ssm_update(x, A_log, B, C, D.astype(mx.bfloat16), dt, dt_bias)
    wanted, last = ssm.ssm_update(x, A_log, B, C, D.astype(mx.bfloat16), dt, dt_bias)
    assert (y.dtype, state.dtype) == (wanted.dtype, last.dtype) == (mx.bfloat16, mx.float32)
    assert_close(y.astype(mx.float32), wanted.astype(mx.float32), 2e-2)
    gradient = mx.grad(lambda x: recurrences.ssm_update(x, A_log, B, C, D, dt, dt_bias)[0].sum())(x)
    assert gradient.dtype == mx.bfloat16


def test_backward_pass_keeps_no_products_of_pairs_of_tokens() -> None:
    x, B, C = (random(1, 512, each, 8, seed=each) for each in (8, 1, 2))
    dt, frozen = random(1, 512, 8), (mx.zeros(8), mx.zeros(8), mx.zeros(8))
    held: list[mx.array] = []

    def loss(x: mx.array) -> mx.array:
        y, _ = recurrences.ssm_update(x, frozen[0], B, C[:, :, :1], frozen[1], dt, frozen[2])
        return (y * y).sum()

    mx.eval(x, B, C, dt)
    before = mx.get_active_memory()
    held += mx.value_and_grad(loss)(x)
    mx.eval(held[0])
    # Weights for all pairs of tokens would alone take 8 heads * 512 * 64 floats.
    assert mx.get_active_memory() - before < 4 * 8 * 512 * 64
