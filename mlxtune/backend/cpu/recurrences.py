"""Loops of recurrences and of what goes with them, compiled as those of `kernels` are.

Each state is computed by itself, so that it stays in the caches.
"""

import numpy as np

from mlxtune.backend.cpu.kernels import exp, inline, kernel

_f = np.float32
_ZERO, _NOTHING, _TINY = _f(0), _f(-50), _f(1e-30)
# Tokens from one kept state to the next. Gradients make the states between them again: first one
# in so many, then those of so many tokens.
GROUP, SEGMENT = 256, 16


@kernel
def state_space(start, end, x, dt, a, b, c, first, y, kept):  # type: ignore[no-untyped-def]
    """Run Mamba 2's recurrence for rows and heads from `start` to `end`, of B H.

    x, y (B, T, H, P), dt (B, T, H), a (H,), b, c (B, T, G, n), `first` (B, H, n, P); `kept`
    (N + 1, B, H, n, P) gets the states before each group of tokens and at the end.
    """
    tokens, heads = x.shape[1], x.shape[2]
    times = heads // b.shape[2]
    inputs = np.empty(x.shape[3], _f)
    for item in range(start, end):
        row, head = item // heads, item % heads
        state = first[row, head].copy()
        for t in range(tokens):
            if t % GROUP == 0:
                kept[t // GROUP, row, head] = state
            given, out, bs, cs = x[row, t, head], y[row, t, head], b[row, t], c[row, t]
            step = dt[row, t, head]
            decay = _gate(step * a[head])
            for j in range(len(out)):
                inputs[j], out[j] = step * given[j], _ZERO
            for k in range(len(state)):
                line, write, read = state[k], bs[head // times, k], cs[head // times, k]
                for j in range(len(out)):
                    value = decay * line[j] + write * inputs[j]
                    line[j] = value
                    out[j] += read * value
        kept[len(kept) - 1, row, head] = state


@kernel
def state_space_back(  # type: ignore[no-untyped-def]
    start, end, x, dt, a, b, c, kept, d_y, d_last, d_x, d_dt, d_b, d_c, d_first
):
    """Write the gradients of what `state_space` takes, but a.

    Each thread adds up those of b and c in its half of (2, B, T, G, n).
    """
    tokens, heads, half = x.shape[1], x.shape[2], 1 if start else 0
    times, (inner, outer) = heads // b.shape[2], d_last.shape[2:]
    starts = np.empty((-(-GROUP // SEGMENT), inner, outer), _f)
    before = np.empty((SEGMENT, inner, outer), _f)
    inputs, d_inputs = np.empty(outer, _f), np.empty(outer, _f)
    for item in range(start, end):
        row, head = item // heads, item % heads
        d_state, own = d_last[row, head].copy(), head // times
        for group in range(len(kept) - 2, -1, -1):
            first, last = group * GROUP, min((group + 1) * GROUP, tokens)
            state = kept[group, row, head].copy()
            for t in range(first, last):
                if (t - first) % SEGMENT == 0:
                    starts[(t - first) // SEGMENT] = state
                step = dt[row, t, head]
                decay, write, given = _gate(step * a[head]), b[row, t, own], x[row, t, head]
                _advanced(state, decay, step, write, given, state)
            for segment in range((last - first - 1) // SEGMENT, -1, -1):
                begin = first + segment * SEGMENT
                stop = min(begin + SEGMENT, last)
                before[0] = starts[segment]
                drop_tiny(d_state)
                for t in range(begin, stop - 1):
                    at, step = t - begin, dt[row, t, head]
                    decay, write, given = _gate(step * a[head]), b[row, t, own], x[row, t, head]
                    _advanced(before[at], decay, step, write, given, before[at + 1])
                for t in range(stop - 1, begin - 1, -1):
                    given, d_out, step = x[row, t, head], d_y[row, t, head], dt[row, t, head]
                    d_bs, d_cs = d_b[half, row, t, own], d_c[half, row, t, own]
                    bs, cs, earlier = b[row, t, own], c[row, t, own], before[t - begin]
                    decay, along, by_decay, by_step = _gate(step * a[head]), _ZERO, _ZERO, _ZERO
                    for j in range(outer):
                        inputs[j], d_inputs[j] = step * given[j], _ZERO
                        along += inputs[j] * d_out[j]
                    for k in range(inner):
                        d_line, line, write, read = d_state[k], earlier[k], bs[k], cs[k]
                        by_read, by_write = _ZERO, _ZERO
                        for j in range(outer):
                            d = d_line[j] + read * d_out[j]
                            by_read += line[j] * d_out[j]
                            by_write += d * inputs[j]
                            d_inputs[j] += write * d
                            d *= decay
                            by_decay += d * line[j]
                            d_line[j] = d
                        d_cs[k] += decay * by_read + write * along
                        d_bs[k] += by_write
                    for j in range(outer):
                        by_step += given[j] * d_inputs[j]
                        d_x[row, t, head, j] = step * d_inputs[j]
                    d_dt[row, t, head] = by_step + a[head] * by_decay
        d_first[row, head] = d_state


@inline
def _gate(log_gate):  # type: ignore[no-untyped-def]
    """Return e to the log-gate; 0 from e^-50 on, which would lead to slow subnormal numbers."""
    return _ZERO if log_gate <= _NOTHING else exp(log_gate)


@inline
def drop_tiny(state):  # type: ignore[no-untyped-def]
    """Set to 0 what decays, far from the tokens that it comes from, into slow subnormal numbers."""
    for k in range(len(state)):
        line = state[k]
        for j in range(len(line)):
            line[j] = _ZERO if abs(line[j]) < _TINY else line[j]


@inline
def _advanced(state, decay, step, write, given, out):  # type: ignore[no-untyped-def]
    """Set `out`, which may be the state (n, P), to it decayed + step * write given^T."""
    for k in range(len(state)):
        line, made, factor = state[k], out[k], write[k] * step
        for j in range(len(given)):
            made[j] = decay * line[j] + factor * given[j]


@kernel
def scan(start, end, x, dt, a, b, c, first, y, last):  # type: ignore[no-untyped-def]
    """Run Mamba's recurrence: x, dt, y (B D, T), a (D, n), b, c (B, T, n), states (B D, n)."""
    for row in range(start, end):
        line, state = row // len(a), last[row]
        decays, bs, cs = a[row % len(a)], b[line], c[line]
        state[:] = first[row]
        for t in range(x.shape[1]):
            step, u, total = dt[row, t], dt[row, t] * x[row, t], _ZERO
            for n in range(len(state)):
                h = _gate(step * decays[n]) * state[n] + u * bs[t, n]
                state[n] = h
                total += h * cs[t, n]
            y[row, t] = total


@kernel
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
                factors[t, n] = _gate(step * decays[n])
                states[t + 1, n] = factors[t, n] * states[t, n] + u * bs[t, n]
        for t in range(length - 1, -1, -1):
            if t % SEGMENT == 0:
                drop_tiny(d[row : row + 1])
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


@kernel
def delta(start, end, q, k, v, log_gates, beta, first, y, kept):  # type: ignore[no-untyped-def]
    """Run the gated delta rule for rows and heads from `start` to `end`, of B Hv.

    Arrays are (B, T, H, ·), with beta (B, T, Hv), `first` (B, Hv, Dk, Dv); `kept`
    (G + 1, B, Hv, Dk, Dv) gets the states before each group of tokens and at the end.
    """
    tokens, heads = v.shape[1], v.shape[2]
    times = heads // q.shape[2]
    error, update = np.empty(v.shape[3], _f), np.empty(v.shape[3], _f)
    gates = np.empty(k.shape[3], _f)
    for item in range(start, end):
        row, head = item // heads, item % heads
        key_head = head // times
        state = first[row, head].copy()
        for t in range(tokens):
            if t % GROUP == 0:
                kept[t // GROUP, row, head] = state
            keys = k[row, t, key_head]
            _set_gates(log_gates[row, t, head], gates)
            _decayed(state, keys, gates, v[row, t, head], error, state)
            for j in range(len(error)):
                update[j] = beta[row, t, head] * error[j]
            out, queries = y[row, t, head], q[row, t, key_head]
            out[:] = _ZERO
            for i in range(len(state)):
                line, key, query = state[i], keys[i], queries[i]
                for j in range(len(out)):
                    value = line[j] + key * update[j]
                    line[j] = value
                    out[j] += query * value
        kept[len(kept) - 1, row, head] = state


@kernel
def delta_back(  # type: ignore[no-untyped-def]
    start, end, q, k, v, log_gates, beta, kept, d_y, d_last, d_q, d_k, d_v, d_gates, d_beta, d_first
):
    """Write the gradients of what `delta` takes, for rows and key heads from `start` to `end`.

    Those of q and k are added to what they hold, those of all value heads.
    """
    tokens, heads, key_heads = v.shape[1], v.shape[2], q.shape[2]
    times, (inner, outer) = heads // key_heads, d_last.shape[2:]
    starts = np.empty((-(-GROUP // SEGMENT), inner, outer), _f)
    before = np.empty((SEGMENT, inner, outer), _f)
    errors, d_update = np.empty((SEGMENT, outer), _f), np.empty(outer, _f)
    update, state = np.empty(outer, _f), np.empty((inner, outer), _f)
    gates, by_gates = np.empty((SEGMENT, inner), _f), np.empty(inner, _f)
    for item in range(start * times, end * times):
        row, head = item // heads, item % heads
        key_head = head // times
        d_state = d_last[row, head].copy()
        for group in range(len(kept) - 2, -1, -1):
            first, last = group * GROUP, min((group + 1) * GROUP, tokens)
            state[:] = kept[group, row, head]
            for t in range(first, last):
                if (t - first) % SEGMENT == 0:
                    starts[(t - first) // SEGMENT] = state
                keys, b = k[row, t, key_head], beta[row, t, head]
                _set_gates(log_gates[row, t, head], gates[0])
                _decayed(state, keys, gates[0], v[row, t, head], errors[0], state)
                _updated(state, keys, errors[0], b, state)
            for segment in range((last - first - 1) // SEGMENT, -1, -1):
                begin = first + segment * SEGMENT
                stop = min(begin + SEGMENT, last)
                state[:] = starts[segment]
                drop_tiny(d_state)
                for t in range(begin, stop):
                    at, keys, b = t - begin, k[row, t, key_head], beta[row, t, head]
                    _set_gates(log_gates[row, t, head], gates[at])
                    _decayed(state, keys, gates[at], v[row, t, head], errors[at], before[at])
                    _updated(before[at], keys, errors[at], b, state)
                for t in range(stop - 1, begin - 1, -1):
                    at, d_out = t - begin, d_y[row, t, head]
                    decayed, error, scales = before[at], errors[at], gates[at]
                    keys, queries = k[row, t, key_head], q[row, t, key_head]
                    d_keys, d_queries = d_k[row, t, key_head], d_q[row, t, key_head]
                    b, along, total = beta[row, t, head], _ZERO, _ZERO
                    for j in range(outer):
                        update[j] = b * error[j]
                        along += update[j] * d_out[j]
                        d_update[j] = _ZERO
                    for i in range(inner):
                        d_line, line, key, query = d_state[i], decayed[i], keys[i], queries[i]
                        by_query, by_key = _ZERO, _ZERO
                        for j in range(outer):
                            d = d_line[j] + query * d_out[j]
                            d_line[j] = d
                            d_update[j] += key * d
                            by_query += line[j] * d_out[j]
                            by_key += d * update[j]
                        d_queries[i] += by_query + key * along
                        d_keys[i] += by_key
                    for j in range(outer):
                        total += d_update[j] * error[j]
                        d_update[j] *= b
                    d_beta[row, t, head] = total
                    d_v[row, t, head] = d_update
                    for i in range(inner):
                        d_line, line, key, gate = d_state[i], decayed[i], keys[i], scales[i]
                        by_key, by_gate = _ZERO, _ZERO
                        for j in range(outer):
                            d = d_line[j] - key * d_update[j]
                            by_key += line[j] * d_update[j]
                            by_gate += d * line[j]
                            d_line[j] = gate * d
                        d_keys[i] -= by_key
                        by_gates[i] = by_gate
                    _put_gates(by_gates, d_gates[row, t, head])
        d_first[row, head] = d_state


@inline
def _set_gates(log_gates, gates):  # type: ignore[no-untyped-def]
    """Set the gates of all channels from log-gates of each, or the one that they share."""
    for i in range(len(log_gates)):
        gates[i] = _gate(log_gates[i])
    if len(log_gates) == 1:
        gates[:] = gates[0]


@inline
def _put_gates(by_channel, out):  # type: ignore[no-untyped-def]
    """Set the gradients of log-gates from those of each channel."""
    if len(out) == 1:
        total = _ZERO
        for i in range(len(by_channel)):
            total += by_channel[i]
        out[0] = total
    else:
        out[:] = by_channel


@inline
def _decayed(state, keys, gates, given, error, out):  # type: ignore[no-untyped-def]
    """Set `out` to the state (Dk, Dv) times the gates, and the error of what it holds for keys."""
    error[:] = given
    for i in range(len(state)):
        line, made, key, gate = state[i], out[i], keys[i], gates[i]
        for j in range(len(error)):
            value = gate * line[j]
            made[j] = value
            error[j] -= key * value


@inline
def _updated(state, keys, error, b, out):  # type: ignore[no-untyped-def]
    """Set `out` to the state plus the update b * error at the keys."""
    for i in range(len(state)):
        line, made, factor = state[i], out[i], keys[i] * b
        for j in range(len(error)):
            made[j] = line[j] + factor * error[j]


@kernel
def convolve(start, end, x, taps, out):  # type: ignore[no-untyped-def]
    """Write the causal convolution (B, T, C) of x (B, T + K - 1, C) with taps (K, C)."""
    for item in range(start, end):
        row, t = item // out.shape[1], item % out.shape[1]
        made = out[row, t]
        made[:] = _ZERO
        for k in range(len(taps)):
            line, tap = x[row, t + k], taps[k]
            for c in range(len(made)):
                made[c] += tap[c] * line[c]


@kernel
def convolve_back(start, end, d, taps, d_x):  # type: ignore[no-untyped-def]
    """Write the gradient (B, T + K - 1, C) of the input, for that of the output (B, T, C)."""
    for item in range(start, end):
        row, t = item // d_x.shape[1], item % d_x.shape[1]
        made = d_x[row, t]
        made[:] = _ZERO
        for k in range(max(0, t - d.shape[1] + 1), min(len(taps), t + 1)):
            line, tap = d[row, t - k], taps[k]
            for c in range(len(made)):
                made[c] += tap[c] * line[c]
