"""Loops over float32 rows, compiled by numba for the processor at hand and cached on disk.

MLX's CPU operations run on one thread, and `exp` and functions that use it take 12 to 25 ns per
element on x86; these loops take less than 1 ns. Arrays are contiguous rows (m, n). A call computes
the rows from `start` to `end`.
"""

import numba
import numpy as np

# Sums may be reordered, so that they can be vectorised. Infinities and NaN keep their meaning.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}
kernel = numba.njit(nogil=True, fastmath=_FASTMATH, error_model="numpy", cache=True)
inline = numba.njit(fastmath=_FASTMATH, error_model="numpy", inline="always")

_f = np.float32
_ZERO, _HALF, _ONE, _TWO = _f(0), _f(0.5), _f(1), _f(2)
_MINUS_INFINITY = _f(-np.inf)
_MIN_EXPONENT, _MAX_EXPONENT, _NEGLIGIBLE_EXPONENT = _f(-87), _f(88), _f(-50)
_LOG2_E, _LN2_HIGH, _LN2_LOW = _f(1.44269504), _f(0.693359375), _f(-2.12194440e-4)
_P0, _P1, _P2 = _f(1.9875691500e-4), _f(1.3981999507e-3), _f(8.3334519073e-3)
_P3, _P4, _P5 = _f(4.1665795894e-2), _f(1.6666665459e-1), _f(5.0000001201e-1)
_GELU_SCALE, _GELU_CUBE = _f(0.7978845608028654), _f(0.044715)


@inline
def exp(x):  # type: ignore[no-untyped-def]
    """Return e to the power of x, as Cephes' expf does, with a relative error of at most 2e-7."""
    x = min(max(x, _MIN_EXPONENT), _MAX_EXPONENT)
    whole = np.floor(x * _LOG2_E + _HALF)
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    # The bits of the exponent hold the power of two.
    power = np.int32((np.int32(whole) + 127) << 23).view(np.float32)
    return (p * r * r + r + _ONE) * power


@inline
def _weight(x):  # type: ignore[no-untyped-def]
    """Return exp(x), or 0 if that is too small to change a sum: subnormal numbers are slow."""
    return exp(x) if x > _NEGLIGIBLE_EXPONENT else _ZERO


@inline
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return _ONE / (_ONE + exp(-x))


@inline
def _tanh(x):  # type: ignore[no-untyped-def]
    return _ONE - _TWO / (_ONE + exp(_TWO * x))


@kernel
def swiglu(start, end, gate, x, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            g = gate[i, j]
            out[i, j] = g * _sigmoid(g) * x[i, j]


@kernel
def swiglu_gradient(start, end, gate, x, d, d_gate, d_x):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            g = gate[i, j]
            s = _sigmoid(g)
            d_x[i, j] = d[i, j] * g * s
            d_gate[i, j] = d[i, j] * x[i, j] * s * (_ONE + g * (_ONE - s))


@kernel
def geglu(start, end, gate, x, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            g = gate[i, j]
            t = _tanh(_GELU_SCALE * g * (_ONE + _GELU_CUBE * g * g))
            out[i, j] = _HALF * g * (_ONE + t) * x[i, j]


@kernel
def geglu_gradient(start, end, gate, x, d, d_gate, d_x):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            g = gate[i, j]
            t = _tanh(_GELU_SCALE * g * (_ONE + _GELU_CUBE * g * g))
            inner = _GELU_SCALE * (_ONE + _f(3) * _GELU_CUBE * g * g)
            d_x[i, j] = d[i, j] * _HALF * g * (_ONE + t)
            slope = _HALF * (_ONE + t + g * (_ONE - t * t) * inner)
            d_gate[i, j] = d[i, j] * x[i, j] * slope


@kernel
def tanh(start, end, x, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(x.shape[1]):
            out[i, j] = _tanh(x[i, j])


@kernel
def tanh_gradient(start, end, x, d, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(x.shape[1]):
            t = _tanh(x[i, j])
            out[i, j] = d[i, j] * (_ONE - t * t)


@kernel
def rms_norm(start, end, x, out, gain, eps):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    for i in range(start, end):
        squares = _ZERO
        for j in range(width):
            squares += x[i, j] * x[i, j]
        r = _ONE / np.sqrt(squares / _f(width) + eps)
        for j in range(width):
            out[i, j] = x[i, j] * r * gain[j]


@kernel
def rms_norm_gradient(start, end, x, d, out, gain, eps):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    for i in range(start, end):
        squares, dot = _ZERO, _ZERO
        for j in range(width):
            squares += x[i, j] * x[i, j]
            dot += d[i, j] * gain[j] * x[i, j]
        r = _ONE / np.sqrt(squares / _f(width) + eps)
        c = dot * r * r / _f(width)
        for j in range(width):
            out[i, j] = r * (d[i, j] * gain[j] - x[i, j] * c)


@inline
def _seen(row, keys, queries, causal):  # type: ignore[no-untyped-def]
    """Return how many keys the query of a row sees; queries are aligned to the end of the keys."""
    return keys - queries + row % queries + 1 if causal else keys


@inline
def _softmax_row(x, i, seen):  # type: ignore[no-untyped-def]
    """Replace visible scores with exp(score - highest) and the others with 0; return the sum."""
    highest, total = _MINUS_INFINITY, _ZERO
    for j in range(seen):
        highest = max(highest, x[i, j])
    for j in range(seen):
        e = _weight(x[i, j] - highest)
        x[i, j] = e
        total += e
    for j in range(seen, x.shape[1]):
        x[i, j] = _ZERO
    return total


@kernel
def softmax_(start, end, x, queries, causal):  # type: ignore[no-untyped-def]
    """Replace scores with their softmax, in place."""
    for i in range(start, end):
        seen = _seen(i, x.shape[1], queries, causal)
        total = _softmax_row(x, i, seen)
        r = _ONE / total
        for j in range(seen):
            x[i, j] *= r


@kernel
def softmax_gradient_(start, end, x, d, queries, causal):  # type: ignore[no-untyped-def]
    """Replace scores x with their softmax, and its gradient d with the gradient of the scores."""
    for i in range(start, end):
        seen = _seen(i, x.shape[1], queries, causal)
        total = _softmax_row(x, i, seen)
        r, dot = _ONE / total, _ZERO
        for j in range(seen):
            x[i, j] *= r
            dot += x[i, j] * d[i, j]
        for j in range(seen):
            d[i, j] = x[i, j] * (d[i, j] - dot)
        for j in range(seen, x.shape[1]):
            d[i, j] = _ZERO


@kernel
def online_softmax_(start, end, x, highest, total, correction):  # type: ignore[no-untyped-def]
    """Add a block of logits x to a softmax; replace each logit with exp(logit - highest so far).

    `highest` and `total` (m,) cover the blocks so far; `correction` (m,) rescales earlier sums.
    """
    for i in range(start, end):
        top = highest[i]
        for j in range(x.shape[1]):
            top = max(top, x[i, j])
        added = _ZERO
        for j in range(x.shape[1]):
            e = _weight(x[i, j] - top)
            x[i, j] = e
            added += e
        correction[i] = np.exp(highest[i] - top)
        total[i] = total[i] * correction[i] + added
        highest[i] = top


@kernel
def turn(start, end, x, cosines, sines, out):  # type: ignore[no-untyped-def]
    """Rotate pairs of entries of x (B, T, H, D) by their token's angles; out is (B, H, T, D)."""
    half = cosines.shape[1]
    for row in range(start, end):
        b, t = row // x.shape[1], row % x.shape[1]
        for h in range(x.shape[2]):
            for j in range(half):
                first, second = x[b, t, h, j], x[b, t, h, half + j]
                out[b, h, t, j] = first * cosines[t, j] - second * sines[t, j]
                out[b, h, t, half + j] = second * cosines[t, j] + first * sines[t, j]
            for j in range(2 * half, x.shape[3]):
                out[b, h, t, j] = x[b, t, h, j]


@kernel
def turn_back(start, end, d, cosines, sines, out):  # type: ignore[no-untyped-def]
    """Rotate pairs of entries of d (B, H, T, D) back; out is (B, T, H, D)."""
    half = cosines.shape[1]
    for row in range(start, end):
        b, t = row // out.shape[1], row % out.shape[1]
        for h in range(out.shape[2]):
            for j in range(half):
                first, second = d[b, h, t, j], d[b, h, t, half + j]
                out[b, t, h, j] = first * cosines[t, j] + second * sines[t, j]
                out[b, t, h, half + j] = second * cosines[t, j] - first * sines[t, j]
            for j in range(2 * half, out.shape[3]):
                out[b, t, h, j] = d[b, h, t, j]


@kernel
def widen(start, end, x, out):  # type: ignore[no-untyped-def]
    """Cast bfloat16 rows x, given as uint16 bits, to float32 rows out, given as uint32 bits."""
    for i in range(start, end):
        for j in range(x.shape[1]):
            out[i, j] = np.uint32(x[i, j]) << np.uint32(16)


@kernel
def add_matmul_(start, end, out, low, update):  # type: ignore[no-untyped-def]
    """Add low (m, r) times update (r, n) to out (m, n), in place, for a small r."""
    for i in range(start, end):
        for k in range(low.shape[1]):
            c = low[i, k]
            for j in range(out.shape[1]):
                out[i, j] += c * update[k, j]
