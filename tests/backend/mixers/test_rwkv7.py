"""RWKV 7's recurrence by chunks and its gradients, against mlx-lm's, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import rwkv7

from mlxtune.backend.mixers.replacements import KINDS
from mlxtune.backend.mixers.rwkv7 import wkv7
from tests.backend.cpu.compared import assert_close, random


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled() -> Iterator[None]:
    # mlx-lm compiles a part of its own, with a C++ compiler on the CPU.
    mx.disable_compile()
    yield
    mx.enable_compile()


def inputs(batch: int, length: int, strength: float) -> list[mx.array]:
    """Return r, w, k, v, a, b and a state for 2 heads of 8, as the model makes them."""
    r, k, v, removed, decay, rate = (random(batch, length, 2, 8, seed=i) for i in range(6))
    removed = removed / mx.linalg.norm(removed, axis=-1, keepdims=True)
    w = mx.exp(-0.606531 * mx.sigmoid(strength * decay))
    return [r, w, k, v, -removed, removed * mx.sigmoid(strength * rate), random(batch, 2, 8, 8)]


def by_tokens(*given: mx.array) -> tuple[mx.array, mx.array]:
    *each, state = (x.astype(mx.float64) for x in given)
    ys = []
    for t in range(each[0].shape[1]):
        y, state = rwkv7._wkv7_step_ops(*(x[:, t] for x in each), state)
        ys.append(y)
    return mx.stack(ys, axis=1).squeeze(-1), state


def results(function: Any, given: list[mx.array]) -> list[Any]:
    """Return y, the last state, and the gradients of a sum of both."""
    dtype = mx.float64 if function is by_tokens else mx.float32
    with mx.stream(mx.cpu):
        weights = [random(*given[i].shape, seed=9).astype(dtype) for i in (0, 6)]
        outputs, gradients = mx.vjp(lambda *x: list(function(*x)), given, weights)
        return [np.array(each.astype(mx.float64)) for each in (*outputs, *gradients)]


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(1, 2), st.integers(2, 140), st.sampled_from([1.0, 50.0]))
def test_recurrence_and_its_gradients(batch: int, length: int, strength: float) -> None:
    given_ = inputs(batch, length, strength)
    for one, other in zip(results(wkv7, given_), results(by_tokens, given_), strict=True):
        assert_close(one, other, 1e-5)


def test_fastest_decay_over_many_chunks() -> None:
    given_ = inputs(1, 300, 1.0)
    given_[1] = mx.full(given_[1].shape, float(np.exp(-0.606531)))
    for one, other in zip(results(wkv7, given_), results(by_tokens, given_), strict=True):
        assert_close(one, other, 1e-5)


def test_time_mixing_calls_it_and_leaves_single_tokens_to_mlx_lm() -> None:
    args = rwkv7.ModelArgs("rwkv7", 50, 16, 32, 1e-5, 8, 1, 4, 4, 4, 4)
    plain = rwkv7.Rwkv7TimeMixing(args, 0)
    chunked = KINDS[rwkv7.Rwkv7TimeMixing](args, 0)
    for length in (1, 70):
        *given_, state = inputs(2, length, 1.0)
        for first in (None, state):
            wanted = plain._wkv7(*given_, first)
            found = chunked._wkv7(*given_, first)
            assert_close(found[0].reshape(wanted[0].shape), wanted[0], 1e-5)
            assert_close(found[1], wanted[1], 1e-5)
