"""Loops over float32 rows, compiled by numba for the processor at hand and cached on disk.

MLX's CPU operations run on one thread, and `exp` and what contains it take some 12 to 25 ns an
element on x86; here it takes below 1. Arrays are rows (m, n), contiguous; `start` and `end` are the
rows that a call works on.
"""

import numba
import numpy as np

# Sums may be taken in any order, which is what lets them be vectorised; infinities and NaN count.
_MATH = {"reassoc", "contract", "arcp", "nsz", "afn"}
_kernel = numba.njit(nogil=True, fastmath=_MATH, error_model="numpy", cache=True)
_inline = numba.njit(fastmath=_MATH, error_model="numpy", inline="always")

_f = np.float32
_ZERO, _HALF, _ONE, _TWO = _f(0), _f(0.5), _f(1), _f(2)
_NO_SINK = _f(-np.inf)
_LOWEST, _HIGHEST, _NOTHING = _f(-87), _f(88), _f(-50)
_LOG2_E, _LN2_HIGH, _LN2_LOW = _f(1.44269504), _f(0.693359375), _f(-2.12194440e-4)
_P0, _P1, _P2 = _f(1.9875691500e-4), _f(1.3981999507e-3), _f(8.3334519073e-3)
_P3, _P4, _P5 = _f(4.1665795894e-2), _f(1.6666665459e-1), _f(5.0000001201e-1)
_GELU_SCALE, _GELU_CUBE = _f(0.7978845608028654), _f(0.044715)


@_inline
def _exp(x):  # type: ignore[no-untyped-def]
    """Return e to the x within 2e-7; the polynomial is that of Cephes' expf."""
    x = min(max(x, _LOWEST), _HIGHEST)
    whole = np.floor(x * _LOG2_E + _HALF)
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    # Writing the exponent makes 2 to the whole number.
    power = np.int32((np.int32(whole) + 127) << 23).view(np.float32)
    return (p * r * r + r + _ONE) * power


@_inline
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return _ONE / (_ONE + _exp(-x))


@_inline
def _tanh(x):  # type: ignore[no-untyped-def]
    return _ONE - _TWO / (_ONE + _exp(_TWO * x))


@_kernel
def swiglu(start, end, gate, x, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            g = gate[i, j]
            out[i, j] = g * _sigmoid(g) * x[i, j]


@_kernel
def swiglu_gradient(start, end, gate, x, d, d_gate, d_x):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            g = gate[i, j]
            s = _sigmoid(g)
            d_x[i, j] = d[i, j] * g * s
            d_gate[i, j] = d[i, j] * x[i, j] * s * (_ONE + g * (_ONE - s))


@_kernel
def clamped_swiglu(start, end, gate, x, out, alpha, limit):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            # Not by min and max, which lose NaN.
            g = limit if gate[i, j] > limit else gate[i, j]
            v = limit if x[i, j] > limit else (-limit if x[i, j] < -limit else x[i, j])
            out[i, j] = (v + _ONE) * g * _sigmoid(alpha * g)


@_kernel
def clamped_swiglu_gradient(start, end, gate, x, d, d_gate, d_x, alpha, limit):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            g = limit if gate[i, j] > limit else gate[i, j]
            v = limit if x[i, j] > limit else (-limit if x[i, j] < -limit else x[i, j])
            s = _sigmoid(alpha * g)
            d_x[i, j] = _ZERO if v != x[i, j] else d[i, j] * g * s
            slope = s * (_ONE + alpha * g * (_ONE - s))
            d_gate[i, j] = _ZERO if g != gate[i, j] else d[i, j] * (v + _ONE) * slope


@_kernel
def geglu(start, end, gate, x, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            g = gate[i, j]
            t = _tanh(_GELU_SCALE * g * (_ONE + _GELU_CUBE * g * g))
            out[i, j] = _HALF * g * (_ONE + t) * x[i, j]


@_kernel
def geglu_gradient(start, end, gate, x, d, d_gate, d_x):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(gate.shape[1]):
            g = gate[i, j]
            t = _tanh(_GELU_SCALE * g * (_ONE + _GELU_CUBE * g * g))
            inner = _GELU_SCALE * (_ONE + _f(3) * _GELU_CUBE * g * g)
            d_x[i, j] = d[i, j] * _HALF * g * (_ONE + t)
            slope = _HALF * (_ONE + t + g * (_ONE - t * t) * inner)
            d_gate[i, j] = d[i, j] * x[i, j] * slope


@_kernel
def silu(start, end, x, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] * _sigmoid(x[i, j])


@_kernel
def silu_gradient(start, end, x, d, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(x.shape[1]):
            s = _sigmoid(x[i, j])
            out[i, j] = d[i, j] * s * (_ONE + x[i, j] * (_ONE - s))


@_kernel
def gelu(start, end, x, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(x.shape[1]):
            v = x[i, j]
            t = _tanh(_GELU_SCALE * v * (_ONE + _GELU_CUBE * v * v))
            out[i, j] = _HALF * v * (_ONE + t)


@_kernel
def gelu_gradient(start, end, x, d, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(x.shape[1]):
            v = x[i, j]
            t = _tanh(_GELU_SCALE * v * (_ONE + _GELU_CUBE * v * v))
            inner = _GELU_SCALE * (_ONE + _f(3) * _GELU_CUBE * v * v)
            out[i, j] = d[i, j] * _HALF * (_ONE + t + v * (_ONE - t * t) * inner)


@_kernel
def tanh(start, end, x, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(x.shape[1]):
            out[i, j] = _tanh(x[i, j])


@_kernel
def tanh_gradient(start, end, x, d, out):  # type: ignore[no-untyped-def]
    for i in range(start, end):
        for j in range(x.shape[1]):
            t = _tanh(x[i, j])
            out[i, j] = d[i, j] * (_ONE - t * t)


@_kernel
def rms_norm(start, end, x, out, gain, eps):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    for i in range(start, end):
        squares = _ZERO
        for j in range(width):
            squares += x[i, j] * x[i, j]
        r = _ONE / np.sqrt(squares / _f(width) + eps)
        for j in range(width):
            out[i, j] = x[i, j] * r * gain[j]


@_kernel
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


@_inline
def _seen(row, keys, queries, causal):  # type: ignore[no-untyped-def]
    """Return how many keys the query of a row sees; queries are aligned to the end of the keys."""
    return keys - queries + row % queries + 1 if causal else keys


@_inline
def _softmax_row(x, i, seen, sink):  # type: ignore[no-untyped-def]
    """Replace the scores that are seen by exp(score - highest), others by 0; return their sum.

    That of the sink, a score with no value, is in the sum.
    """
    highest, total = sink, _ZERO
    for j in range(seen):
        highest = max(highest, x[i, j])
    for j in range(seen):
        e = _exp(x[i, j] - highest)
        x[i, j] = e
        total += e
    for j in range(seen, x.shape[1]):
        x[i, j] = _ZERO
    return total + _exp(sink - highest)


@_kernel
def softmax_(start, end, x, queries, causal, sinks=None):  # type: ignore[no-untyped-def]
    """Replace scores by their softmax, in place; `sinks` are scores (m,) that have no values."""
    for i in range(start, end):
        seen = _seen(i, x.shape[1], queries, causal)
        total = _softmax_row(x, i, seen, _NO_SINK if sinks is None else sinks[i])
        r = _ONE / total
        for j in range(seen):
            x[i, j] *= r


@_kernel
def softmax_gradient_(start, end, x, d, queries, causal, sinks=None):  # type: ignore[no-untyped-def]
    """Replace scores by their softmax, and its gradient by that of the scores, in place."""
    for i in range(start, end):
        seen = _seen(i, x.shape[1], queries, causal)
        total = _softmax_row(x, i, seen, _NO_SINK if sinks is None else sinks[i])
        r, dot = _ONE / total, _ZERO
        for j in range(seen):
            x[i, j] *= r
            dot += x[i, j] * d[i, j]
        for j in range(seen):
            d[i, j] = x[i, j] * (d[i, j] - dot)
        for j in range(seen, x.shape[1]):
            d[i, j] = _ZERO


@_kernel
def online_softmax_(start, end, x, highest, total, correction):  # type: ignore[no-untyped-def]
    """Take in one more block of logits: replace them by exp(logit - the highest so far).

    `highest` and `total` (m,) are of the blocks so far; `correction` (m,) is what the earlier ones
    are to be multiplied by.
    """
    for i in range(start, end):
        top = highest[i]
        for j in range(x.shape[1]):
            top = max(top, x[i, j])
        added = _ZERO
        for j in range(x.shape[1]):
            e = _exp(x[i, j] - top)
            x[i, j] = e
            added += e
        correction[i] = np.exp(highest[i] - top)
        total[i] = total[i] * correction[i] + added
        highest[i] = top


@_kernel
def turn(start, end, x, cosines, sines, out):  # type: ignore[no-untyped-def]
    """Turn pairs of entries of x (B, T, H, D) by the angles of T; out is (B, H, T, D)."""
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


@_kernel
def turn_back(start, end, d, cosines, sines, out):  # type: ignore[no-untyped-def]
    """Turn pairs of entries of d (B, H, T, D) back; out is (B, T, H, D)."""
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


@_kernel
def widen(start, end, x, out):  # type: ignore[no-untyped-def]
    """Write bfloat16 rows, given as uint16, as the uint32 of the same float32."""
    for i in range(start, end):
        for j in range(x.shape[1]):
            out[i, j] = np.uint32(x[i, j]) << np.uint32(16)


@_kernel
def add_product_(start, end, out, low, update):  # type: ignore[no-untyped-def]
    """Add low (m, r) times update (r, n) to out (m, n), in place, for a small r."""
    for i in range(start, end):
        for k in range(low.shape[1]):
            c = low[i, k]
            for j in range(out.shape[1]):
                out[i, j] += c * update[k, j]


@_inline
def _decay(coarse, fine):  # type: ignore[no-untyped-def]
    """Return exp(coarse + fine) for |fine| < 2^-6, in a way that never rounds their sum.

    It is 0 from e^-50 on: products with subnormal numbers, which smaller ones lead to, are slow.
    """
    e = _exp(coarse) * (_ONE + fine * (_ONE + fine * (_HALF + fine * _P4)))
    return e if coarse > _NOTHING else _ZERO


@_kernel
def weigh(start, end, out, sums, pairs):  # type: ignore[no-untyped-def]
    """Write pairs (m / r, c, c) times exp(sums_i - sums_j), of sums (2, m, c), for j <= i."""
    heads = len(out) // len(pairs)
    for m in range(start, end):
        # Only rows that are looked up outside of the loops let these be vectorised.
        rows, given, coarse, fine = out[m], pairs[m // heads], sums[0, m], sums[1, m]
        for i in range(len(rows)):
            for j in range(i + 1):
                rows[i, j] = given[i, j] * _decay(coarse[i] - coarse[j], fine[i] - fine[j])


@_kernel
def weigh_back(start, end, out, sums, pairs, d, d_pairs, d_decays):  # type: ignore[no-untyped-def]
    """Write what `weigh` writes, and the gradients of pairs and of what the sums are of (m, c).

    d is the gradient of `out`. A decay is between all tokens before it and those from it on.
    """
    length, heads = out.shape[1], len(out) // len(pairs)
    after = np.empty(length, np.float32)
    for m in range(start * heads, end * heads):
        rows, d_rows, coarse, fine = out[m], d[m], sums[0, m], sums[1, m]
        given, d_given = pairs[m // heads], d_pairs[m // heads]
        after[:] = _ZERO
        for i in range(length - 1, -1, -1):
            total = _ZERO
            for j in range(i):
                e = _decay(coarse[i] - coarse[j], fine[i] - fine[j])
                w = given[i, j] * e
                rows[i, j] = w
                d_given[i, j] += d_rows[i, j] * e
                after[j] += d_rows[i, j] * w
                total += after[j]
            rows[i, i] = given[i, i]
            d_given[i, i] += d_rows[i, i]
            d_decays[m, i] = total


@_kernel
def scan(start, end, x, dt, a, b, c, first, y, last):  # type: ignore[no-untyped-def]
    """Run Mamba's recurrence: x, dt, y (B D, T), a (D, n), b, c (B, T, n), states (B D, n)."""
    for row in range(start, end):
        line, state = row // len(a), last[row]
        decays, bs, cs = a[row % len(a)], b[line], c[line]
        state[:] = first[row]
        for t in range(x.shape[1]):
            step, u, total = dt[row, t], dt[row, t] * x[row, t], _ZERO
            for n in range(len(state)):
                h = _exp(step * decays[n]) * state[n] + u * bs[t, n]
                state[n] = h
                total += h * cs[t, n]
            y[row, t] = total


@_kernel
def scan_back(start, end, x, dt, a, b, c, first, d_y, d, d_x, d_dt, d_b, d_c):  # type: ignore
    """Write the gradients of what `scan` takes; d is that of the last state, then of the first.

    Each thread adds up those of b and c in its half of (2, B, T, n).
    """
    length, half = x.shape[1], 1 if start else 0
    states, factors = np.empty((length + 1, a.shape[1]), _f), np.empty((length, a.shape[1]), _f)
    for row in range(start, end):
        line, back = row // len(a), d[row]
        decays, bs, cs = a[row % len(a)], b[line], c[line]
        d_bs, d_cs = d_b[half, line], d_c[half, line]
        states[0] = first[row]
        for t in range(length):
            step, u = dt[row, t], dt[row, t] * x[row, t]
            for n in range(len(back)):
                factors[t, n] = _exp(step * decays[n])
                states[t + 1, n] = factors[t, n] * states[t, n] + u * bs[t, n]
        for t in range(length - 1, -1, -1):
            u, d_out, d_u, d_step = dt[row, t] * x[row, t], d_y[row, t], _ZERO, _ZERO
            for n in range(len(back)):
                g = back[n] + d_out * cs[t, n]
                d_cs[t, n] += d_out * states[t + 1, n]
                d_bs[t, n] += g * u
                d_u += g * bs[t, n]
                g *= factors[t, n]
                d_step += g * states[t, n] * decays[n]
                back[n] = g
            d_x[row, t] = d_u * dt[row, t]
            d_dt[row, t] = d_u * x[row, t] + d_step
