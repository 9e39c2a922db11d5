"""The gated delta rule by chunks, against mlx-lm's loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from mlxtune.backend.models.mixers import gated_delta

Arrays = list[mx.array]
NAMES = ("q", "k", "v", "a", "b", "state")


@dataclass(frozen=True)
class Case:
    """The sizes and options of a call; `strength` scales the gates' input `a`."""

    tokens: int = 70
    rows: int = 2
    key_heads: int = 1
    heads: int = 2
    key_size: int = 8
    value_size: int = 4
    channels: bool = False
    strength: float = 1.0
    masked: bool = False
    equal_keys: bool = False
    lower_bound: float | None = None
    doubled: bool = False

    def inputs(self) -> tuple[Arrays, Arrays, mx.array | None]:
        """Return the arrays named in `NAMES`, the frozen A_log and dt_bias, and the mask."""
        rng = np.random.default_rng(0)
        gates = (self.heads, self.key_size) if self.channels else (self.heads,)
        shape = (self.rows, self.tokens)
        q, k = rng.standard_normal((2, *shape, self.key_heads, self.key_size))
        if self.equal_keys:
            k[:] = k[:1, :1]
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        v = rng.standard_normal((*shape, self.heads, self.value_size))
        a, b = (
            self.strength * rng.standard_normal((*shape, *gates)),
            3 * rng.standard_normal((*shape, self.heads)),
        )
        state = rng.standard_normal((self.rows, self.heads, self.value_size, self.key_size))
        rate = np.log(rng.uniform(0.1, 4, (self.heads, 1) if self.channels else self.heads))
        bias = rng.standard_normal(gates)
        mask = mx.array(rng.random(shape) < 0.7) if self.masked else None
        return (
            [mx.array(x.astype(np.float32)) for x in (q, k, v, a, b, state)],
            [mx.array(x.astype(np.float32)) for x in (rate, bias)],
            mask,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"lower_bound": self.lower_bound, "allow_neg_eigval": self.doubled}


def by_mlx_lm(q: Any, k: Any, v: Any, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
    """Return mlx-lm's results, with its gates computed in the inputs' dtype."""
    rate, bias, state, mask = rest
    low, doubled = options["lower_bound"], options["allow_neg_eigval"]
    x = a + bias
    log_gates = -mx.exp(rate) * mx.logaddexp(x, mx.zeros_like(x))
    if low is not None:
        log_gates = low * mx.sigmoid(mx.exp(rate) * x)
    beta = mx.sigmoid(b) * (2 if doubled else 1)
    return mlx_lm_gated_delta.gated_delta_ops(
        q, k, v, mx.exp(log_gates), beta, state=state, mask=mask
    )


def results(function: Callable[..., Any], case: Case, dtype: mx.Dtype) -> list[np.ndarray]:
    """Return y, the last state, and the gradients for the arrays in `NAMES`."""
    inputs, frozen, mask = case.inputs()
    rng = np.random.default_rng(1)
    with mx.stream(mx.cpu):
        inputs, frozen = ([x.astype(dtype) for x in each] for each in (inputs, frozen))

        def run(*given: mx.array) -> Sequence[mx.array]:
            y, state = function(*given[:5], *frozen, given[5], mask, **case.options)
            # mlx-lm's outputs for masked tokens are meaningless, and differ between devices.
            return y if mask is None else mx.where(mask[..., None, None], y, 0), state

        outputs = run(*inputs)
        cotangents = [mx.array(rng.standard_normal(x.shape)).astype(dtype) for x in outputs]
        found = [*outputs, *mx.vjp(run, inputs, cotangents)[1]]
        mx.eval(found)
        return [np.array(x) for x in found]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Disable compilation: compiling mlx-lm's step takes longer than running it on a few tokens."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def assert_equal(case: Case) -> None:
    expected = results(by_mlx_lm, case, mx.float64)
    found = results(gated_delta.gated_delta_update, case, mx.float32)
    largest = max(np.abs(each).max() for each in expected[2:])
    for name, one, other in zip(("y", "end", *NAMES), found, expected, strict=True):
        assert one.shape == other.shape
        # With a strong decay, the gates' gradients are small differences of larger numbers.
        size = largest if name in NAMES else np.abs(other).max()
        assert np.abs(one - other).max() <= 5e-6 * max(size, 0.1), name


@settings(deadline=None, max_examples=6)
@given(
    st.builds(
        Case,
        tokens=st.integers(1, 150),
        rows=st.integers(1, 3),
        key_heads=st.integers(1, 2),
        heads=st.sampled_from([2, 4]),
        channels=st.booleans(),
        strength=st.sampled_from([0.0, 1.0, 100.0]),
        masked=st.booleans(),
        equal_keys=st.booleans(),
        lower_bound=st.sampled_from([None, -5.0]),
        doubled=st.booleans(),
    )
)
@example(Case(tokens=130, key_heads=2, heads=4, doubled=True))
@example(Case(tokens=130, channels=True, masked=True, lower_bound=-5.0))
@example(Case(tokens=64, masked=True, strength=1000.0))
def test_equals_mlx_lm_in_float64(case: Case) -> None:
    assert_equal(case)


def test_mlx_lm_computes_gates_and_betas_as_here() -> None:
    for case in (Case(), Case(channels=True, lower_bound=-5.0, doubled=True)):
        inputs, (rate, bias), _ = case.inputs()
        given = (*inputs[:5], rate, bias, inputs[5])
        one = gated_delta.gated_delta_update(*given, **case.options)
        other = mlx_lm_gated_delta.gated_delta_update(*given, use_kernel=False, **case.options)
        for x, y in zip(one, other, strict=True):
            assert mx.allclose(x, y, rtol=1e-4, atol=1e-5)


def test_groups_of_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=300, rows=1)
    whole = results(gated_delta.gated_delta_update, case, mx.float32)
    monkeypatch.setattr(gated_delta, "_TOKENS", 128)
    for one, other in zip(
        results(gated_delta.gated_delta_update, case, mx.float32), whole, strict=True
    ):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_gates_of_0_and_1_are_exact_for_equal_keys(gate: float) -> None:
    """With equal unit keys and betas of 1, the state holds the last value for the key."""
    q = k = mx.broadcast_to(mx.array([1.0, 0, 0, 0]), (1, 200, 1, 4))
    v = mx.random.normal((1, 200, 1, 3), key=mx.random.key(0))
    beta, start = mx.ones((1, 200, 1)), mx.ones((1, 1, 3, 4))
    log_gates = mx.log(mx.full((1, 200, 1), gate))
    given = [q, k, v, log_gates, beta, start]
    y, state = gated_delta.by_chunks(*given)
    # The tolerance allows for the rounding of products, which differs between processors.
    assert mx.allclose(y, v, rtol=0, atol=1e-5)
    assert mx.allclose(state[0, 0, :, 0], v[0, -1, 0], rtol=0, atol=1e-5)
    assert mx.all(state[..., 1:] == gate)
    gradients = mx.grad(lambda *x: gated_delta.by_chunks(*x)[0].sum(), range(6))(*given)
    assert all(mx.all(mx.isfinite(gradient)) for gradient in gradients)


@pytest.mark.parametrize("tokens", [1 << 12, pytest.param(1 << 15, marks=pytest.mark.slow)])
def test_long_rows_stay_accurate(tokens: int) -> None:
    """Compares gates near 1 with the formula, token by token in float64."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, tokens, 1, 4)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((1, tokens, 1, 2)).astype(np.float32)
    log_gates = -1e-4 * rng.random((1, tokens, 1)).astype(np.float32)
    beta = rng.random((1, tokens, 1)).astype(np.float32)
    given = [mx.array(x) for x in (q, k, v, log_gates, beta, np.zeros((1, 1, 2, 4), np.float32))]
    y, state = gated_delta.by_chunks(*given)
    expected, s = np.zeros((tokens, 2)), np.zeros((2, 4))
    wide = [x[0, :, 0].astype(np.float64) for x in (q, k, v, np.exp(log_gates), beta)]
    for t, (query, key, value, gate, b) in enumerate(zip(*wide, strict=True)):
        s = gate * s
        s += b * np.outer(value - s @ key, key)
        expected[t] = s @ query
    assert np.abs(np.array(y)[0, :, 0] - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(np.array(state)[0, 0] - s).max() <= 1e-4 * np.abs(s).max()


def test_results_have_dtypes_of_mlx_lm() -> None:
    inputs, frozen, _ = Case(tokens=5).inputs()
    q, k, v, a, b, state = [x.astype(mx.bfloat16) for x in inputs[:5]] + inputs[5:]
    y, end = gated_delta.gated_delta_update(q, k, v, a, b, *frozen, state)
    assert (y.dtype, end.dtype) == (mx.bfloat16, mx.float32)
    gradients = mx.grad(
        lambda *x: gated_delta.gated_delta_update(*x, *frozen)[0].sum().astype(mx.float32), range(5)
    )(q, k, v, a, b)
    assert all(gradient.dtype == mx.bfloat16 for gradient in gradients)


# Shapes for which MLX has kernels

SERVED = Case(tokens=9, rows=1, key_heads=16, heads=32, key_size=128, value_size=128)


@pytest.mark.parametrize(
    ("case", "served"),
    [
        (SERVED, True),
        (replace(SERVED, key_heads=32), True),
        (replace(SERVED, heads=40), False),
        (replace(SERVED, key_size=64, value_size=64), False),
        (replace(SERVED, value_size=256), False),
    ],
)
def test_metal_takes_its_kernels_for_their_shapes_alone(
    case: Case, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = mx.zeros((1, 1, case.key_heads, case.key_size))
    v = mx.zeros((1, 1, case.heads, case.value_size))
    assert not gated_delta._has_kernel(k, v), "the CPU has none"
    monkeypatch.setattr(gated_delta, "_on_metal", lambda: True)
    assert gated_delta._has_kernel(k, v) == served


def test_cuda_takes_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    heads = mx.zeros((1, 1, 16, 128))
    assert not gated_delta._has_kernel(heads, heads)


@pytest.mark.parametrize("masked", [False, True])
def test_kernels_of_mlx_equal_the_chunks(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, frozen, mask = replace(SERVED, masked=masked).inputs()
    weight = mx.random.normal((1, SERVED.tokens, SERVED.heads, 128), key=mx.random.key(1))

    def summed(*arrays: mx.array) -> mx.array:
        *given, state = arrays
        y, last = gated_delta.gated_delta_update(*given, *frozen, state, mask)
        return (y * weight).sum() + last.sum()

    found = []
    for has_kernel in (True, False):
        monkeypatch.setattr(gated_delta, "_has_kernel", lambda k, v, has=has_kernel: has)
        found.append(mx.value_and_grad(summed, argnums=list(range(6)))(*arrays))
    (one, gradients), (other, wanted) = found
    assert mx.allclose(one, other, rtol=1e-4)
    for each, expected in zip(gradients, wanted, strict=True):
        assert mx.abs(each - expected).max() <= 1e-4 * mx.abs(expected).max()
