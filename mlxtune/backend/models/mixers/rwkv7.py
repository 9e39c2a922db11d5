"""RWKV 7's recurrence by chunks: arXiv:2503.14456, equations 15 to 17.

For each head, with the state S (values, keys), decays w and rank-one changes of the state:

    S_t = S_(t-1) diag(w_t) + (S_(t-1) a_t) b_t^T + v_t k_t^T        y_t = S_t r_t

mlx-lm runs it token by token, and its kernel for Metal has no gradient. As in arXiv:2412.06464,
section 3.3: u_t = S_(t-1) a_t of all tokens of a chunk are the solution of a triangular system.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rwkv7 import Rwkv7TimeMixing

from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers.triangular import strictly_lower, unit_inverse
from mlxtune.backend.models.replaced import subclasses

# RWKV's decays are at least e^-0.607, so that over a chunk e^39 bounds their reciprocals.
_CHUNK = 64


def wkv7(*inputs: mx.array) -> tuple[mx.array, mx.array]:
    """Return y (B, T, H, D) and the last state (B, H, D, D) for r, w, k, v, a, b and a state.

    r, w, k, v, a and b are (B, T, H, D). Only the inputs are kept for the backward pass.
    """

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        return list(mx.vjp(_run, list(primals), list(cotangents))[1])

    y, state = differentiable(_run, backward)(*inputs)
    return y, state


class ChunkedTimeMixing(nn.Module):
    """RWKV 7's time mixing, with its recurrence by `rule`."""

    rule = staticmethod(wkv7)

    def _wkv7(self, *inputs: Any) -> tuple[mx.array, mx.array]:
        *given, state = inputs
        batch, length, heads, width = given[0].shape
        if length == 1:
            return super()._wkv7(*inputs)
        if state is None:
            state = mx.zeros((batch, heads, width, width))
        return self.rule(*given, state)


def _run(
    r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array
) -> list[mx.array]:
    length, dtype = r.shape[1], r.dtype
    chunk = min(_CHUNK, 1 << (length - 1).bit_length())
    decays = _chunks(mx.log(w.astype(mx.float32)), chunk)
    r, k, v, a, b = (_chunks(each, chunk) for each in (r, k, v, a, b))
    # MLX's cumsum has a wrong gradient where decays are equal.
    below = mx.tri(chunk, chunk)
    sums = below @ decays
    r, a = r * mx.exp(sums), a * mx.exp(sums - decays)
    grown = mx.exp(-sums)
    by_k, by_b = _transposed(k * grown), _transposed(b * grown)
    inverse = _inverse(strictly_lower(-(a @ by_b)))
    # u = `fixed` + `moving` S^T, where S is the state that the chunk begins with.
    fixed, moving = inverse @ (strictly_lower(a @ by_k) @ v), inverse @ a
    from_k, from_u = below * (r @ by_k), below * (r @ by_b)

    last = mx.exp(sums[..., -1, :, None])
    by_k, by_b = last * by_k, last * by_b
    carried, added = by_b @ moving + last * mx.eye(last.shape[-2]), by_k @ v + by_b @ fixed
    states = [_transposed(state.astype(mx.float32))]
    for n in range(added.shape[2]):
        states.append(carried[:, :, n] @ states[-1] + added[:, :, n])
    y = from_k @ v + from_u @ fixed + (r + from_u @ moving) @ mx.stack(states[:-1], axis=2)
    y = y.transpose(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]
    return [y.astype(dtype), _transposed(states[-1]).astype(dtype)]


def _chunks(x: mx.array, chunk: int) -> mx.array:
    """Return (B, T, H, D) as float32 (B, H, N, C, D), with zeros behind."""
    x = mx.pad(x.astype(mx.float32), [(0, 0), (0, -x.shape[1] % chunk), (0, 0), (0, 0)])
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).transpose(0, 3, 1, 2, 4)


def _inverse(a: mx.array) -> mx.array:
    """Return (I + A)^-1 for strictly lower triangular A (..., C, C)."""

    def gradient(a: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
        back = _transposed(inverse)
        return -(back @ cotangent @ back)

    return differentiable(unit_inverse, gradient)(a)


def _transposed(x: mx.array) -> mx.array:
    return x.swapaxes(-1, -2)


KINDS = subclasses(ChunkedTimeMixing, Rwkv7TimeMixing)
