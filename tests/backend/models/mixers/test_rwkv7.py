"""RWKV 7's recurrence by chunks and by kernels, with its gradients, against mlx-lm's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import rwkv7

from mlxtune.backend.models.mixers import rwkv7 as by_chunks
from mlxtune.backend.models.mixers.replacements import KINDS
from tests.backend.cpu.compared import assert_close, random
from tests.backend.kernels import kernel_module

by_kernels = kernel_module("rwkv7")

RULES = {"chunks": by_chunks.wkv7, "kernels": by_kernels.wkv7}


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled() -> Iterator[None]:
    # mlx-lm compiles a part of its own, with a C++ compiler on the CPU.
    mx.disable_compile()
    yield
    mx.enable_compile()


def inputs(batch: int, length: int, strength: float, width: int = 8) -> list[mx.array]:
    """Return r, w, k, v, a, b and a state for 2 heads of a width, as the model makes them."""
    r, k, v, removed, decay, rate = (random(batch, length, 2, width, seed=i) for i in range(6))
    removed = removed / mx.linalg.norm(removed, axis=-1, keepdims=True)
    w = mx.exp(-0.606531 * mx.sigmoid(strength * decay))
    change = removed * mx.sigmoid(strength * rate)
    return [r, w, k, v, -removed, change, random(batch, 2, width, width)]


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


def assert_as_by_tokens(rule: str, given: list[mx.array]) -> None:
    for one, other in zip(results(RULES[rule], given), results(by_tokens, given), strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(1, 2), st.integers(1, 140), st.sampled_from([1.0, 50.0]))
def test_recurrence_and_its_gradients(rule: str, batch: int, length: int, strength: float) -> None:
    assert_as_by_tokens(rule, inputs(batch, length, strength))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("width", "length"), [(64, 17), (20, 1)])
def test_heads_of_other_widths(rule: str, width: int, length: int) -> None:
    assert_as_by_tokens(rule, inputs(2, length, 1.0, width))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("log_decay", [-0.606531, 0.0])
def test_bounds_of_the_decay_over_many_chunks(rule: str, log_decay: float) -> None:
    """Also past a state that the kernels keep."""
    given_ = inputs(1, 300, 1.0)
    given_[1] = mx.full(given_[1].shape, float(np.exp(log_decay)))
    assert_as_by_tokens(rule, given_)


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
