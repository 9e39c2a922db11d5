"""Decay between the tokens of a chunk: products of gates, as exponentials of sums of log-gates.

Every exponent is a sum of log-gates, never a difference of two such sums. So it is at most 0, exact
for gates of 0 and 1, and no exponential overflows, however strong the decay.
"""

import mlx.core as mx

from mlxtune.backend.models.mixers.triangular import joined, strictly_lower

# The logarithm of a gate of 0: sums of it stay finite, and their exponentials are 0.
_LOWEST = -1e4


class Decay:
    """The decay within chunks, with log-gates (..., C, 1) of a head or (..., C, K) of its channels.

    `from_start` (like the log-gates) is the decay from the start of the chunk up to and with each
    token, `to_end` that from after each token to the end, `whole` (..., 1, ·) that of the chunk.
    """

    def __init__(self, log_gates: mx.array) -> None:
        self.channels = log_gates.shape[-1] > 1
        self._log_gates = log_gates = mx.maximum(log_gates, _LOWEST)
        self.from_start = mx.exp(log_gates.cumsum(-2))
        self.to_end = mx.exp(sums_after(log_gates))
        self.whole = self.from_start[..., -1:, :]


class HeadDecay(Decay):
    """One gate for a head and token."""

    def __init__(self, log_gates: mx.array) -> None:
        super().__init__(log_gates)
        size = log_gates.shape[-2]
        lower = mx.tri(size, size, 0, mx.float32)
        # Row t, column i: the sum of the log-gates after token i up to t.
        sums = (strictly_lower(lower) * self._log_gates).cumsum(-2)
        self._between = lower * mx.exp(sums)

    def products(self, x: mx.array, k: mx.array) -> mx.array:
        """Return x_t k_i^T times the decay from i to t, (..., C, C); 0 for i > t."""
        return self._between * (x @ k.swapaxes(-1, -2))

    def gradients(self, d: mx.array, x: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        """Return the gradients of x and k, for the gradient d of `products(x, k)`."""
        d = self._between * d
        return d @ k, d.swapaxes(-1, -2) @ x


class ChannelDecay(Decay):
    """One gate for each channel of a key.

    Products are scaled channel by channel, before they are summed. The decay from a token in the
    first half of a block to one in the second is that to the middle times that from the middle;
    each half is split likewise (secondary chunking: arXiv:2312.06635, section 4.3).
    """

    def __init__(self, log_gates: mx.array) -> None:
        super().__init__(log_gates)
        self._levels: list[tuple[mx.array, mx.array]] = []
        half = 1
        while half < log_gates.shape[-2]:
            first, second = _halves(self._log_gates, half)
            self._levels.append((mx.exp(sums_after(first)), mx.exp(second.cumsum(-2))))
            half *= 2

    def products(self, x: mx.array, k: mx.array) -> mx.array:
        """Return the sums over channels of x_t k_i times the decay from i to t, (..., C, C)."""
        found = (x * k).sum(axis=-1)[..., None, None]
        for level, (to_middle, from_middle) in enumerate(self._levels):
            later, earlier = _halves(x, 1 << level)[1], _halves(k, 1 << level)[0]
            corner = (later * from_middle) @ (earlier * to_middle).swapaxes(-1, -2)
            pairs = found.reshape(*corner.shape[:-2], 2, *corner.shape[-2:])
            found = joined(pairs[..., 0, :, :], corner, pairs[..., 1, :, :])
        return found[..., 0, :, :]

    def gradients(self, d: mx.array, x: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        """Return the gradients of x and k, for the gradient d of `products(x, k)`."""
        blocks = d[..., None, :, :]
        d_x, d_k = mx.zeros_like(x), mx.zeros_like(x)
        for level in reversed(range(len(self._levels))):
            half, (to_middle, from_middle) = 1 << level, self._levels[level]
            later, earlier = _halves(x, half)[1], _halves(k, half)[0]
            corner = blocks[..., half:, :half]
            d_later = from_middle * (corner @ (earlier * to_middle))
            d_earlier = to_middle * (corner.swapaxes(-1, -2) @ (later * from_middle))
            none = mx.zeros_like(d_later)
            d_x += mx.stack([none, d_later], axis=-3).reshape(x.shape)
            d_k += mx.stack([d_earlier, none], axis=-3).reshape(x.shape)
            kept = mx.stack([blocks[..., :half, :half], blocks[..., half:, half:]], axis=-3)
            blocks = kept.reshape(*d.shape[:-2], -1, half, half)
        diagonal = blocks[..., 0]
        return d_x + diagonal * k, d_k + diagonal * x


def decay(log_gates: mx.array) -> HeadDecay | ChannelDecay:
    """Return the decay within chunks; see `Decay`."""
    return HeadDecay(log_gates) if log_gates.shape[-1] == 1 else ChannelDecay(log_gates)


def sums_before(x: mx.array) -> mx.array:
    """Return the sums of what comes before each entry of axis -2."""
    none = mx.zeros_like(x[..., :1, :])
    return mx.concatenate([none, x[..., :-1, :].cumsum(-2)], axis=-2)


def sums_from(x: mx.array) -> mx.array:
    """Return the sums of each entry of axis -2 and what comes after it."""
    return x[..., ::-1, :].cumsum(-2)[..., ::-1, :]


def sums_after(x: mx.array) -> mx.array:
    """Return the sums of what comes after each entry of axis -2."""
    return sums_before(x[..., ::-1, :])[..., ::-1, :]


def _halves(x: mx.array, half: int) -> tuple[mx.array, mx.array]:
    """Return the halves (..., C / 2h, h, ·) of the blocks of 2h tokens in x (..., C, ·)."""
    blocks = x.reshape(*x.shape[:-2], -1, 2, half, x.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]
