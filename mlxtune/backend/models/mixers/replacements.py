"""The functions and layers of mlx-lm's models that this folder replaces."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base, rwkv7, ssm
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from mlxtune.backend.models.mixers import convolution, experts, state_space
from mlxtune.backend.models.mixers.attention import scaled_dot_product_attention
from mlxtune.backend.models.mixers.blocks import by_blocks
from mlxtune.backend.models.mixers.gated_delta import gated_delta_update
from mlxtune.backend.models.replaced import Replacements, subclasses
from mlxtune.backend.models.windows import create_attention_mask

# The tokens of a block, of which the backward pass has the states in memory.
_BLOCK = 64


class _TimeMixing(nn.Module):
    """RWKV 7's time mixing by mlx-lm's loop over tokens; its kernel for Metal has no gradient."""

    def _wkv7(self, *inputs: Any) -> tuple[mx.array, mx.array]:
        *given, state = inputs
        batch, length, heads, width = given[0].shape
        if length == 1:
            return super()._wkv7(*inputs)
        if state is None:
            state = mx.zeros((batch, heads, width, width), given[0].dtype)
        return by_blocks(_loop, given, state, _BLOCK)


def _loop(*inputs: mx.array) -> tuple[mx.array, mx.array]:
    *given, state = inputs
    outputs = []
    for token in range(given[0].shape[1]):
        y, state = rwkv7._wkv7_step_ops(*(x[:, token] for x in given), state)
        outputs.append(y)
    return mx.stack(outputs, axis=1).astype(given[0].dtype), state


# By the identity of what is replaced.
FUNCTIONS: dict[int, Any] = {
    id(base.create_attention_mask): create_attention_mask,
    id(base.scaled_dot_product_attention): scaled_dot_product_attention,
    id(mlx_lm_gated_delta.gated_delta_update): gated_delta_update,
    id(ssm.ssm_update): state_space.ssm_update,
}
KINDS: dict[type, type] = {
    **convolution.KINDS,
    **experts.KINDS,
    **subclasses(_TimeMixing, rwkv7.Rwkv7TimeMixing),
}

MIXERS = Replacements(FUNCTIONS, KINDS)
