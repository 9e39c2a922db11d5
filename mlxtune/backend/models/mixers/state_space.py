"""Mamba 2's recurrence as mlx-lm computes it, in blocks that the backward pass runs again."""

import mlx.core as mx
from mlx_lm.models import ssm

from mlxtune.backend.models.mixers.blocks import by_blocks

# The tokens of a block, as many as mlx-lm takes at once: it makes weights of all their pairs.
_BLOCK = 256


def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return mlx-lm's result of this name: y (B, T, H, P) and the state (B, H, P, n).

    A_log, D and dt_bias are frozen. Masks and lengths come with generation alone.
    """
    x = hidden_states
    if mask is not None or lengths is not None or x.shape[1] == 1:
        return ssm.ssm_update(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths)
    if state is None:
        state = mx.zeros((x.shape[0], *x.shape[2:], B.shape[-1]))

    def run(
        x: mx.array, B: mx.array, C: mx.array, dt: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        return ssm.ssm_attn(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit)

    return by_blocks(run, (x, B, C, dt), state, _BLOCK)
