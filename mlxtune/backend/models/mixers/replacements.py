"""The functions and layers of mlx-lm's models that this folder replaces."""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import base, jamba, mamba, rwkv7, ssm
from mlx_lm.models import gated_delta as mlx_lm_gated_delta
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlxtune.backend.models.mixers import state_space
from mlxtune.backend.models.mixers.attention import scaled_dot_product_attention
from mlxtune.backend.models.mixers.convolution import DepthwiseConv1d
from mlxtune.backend.models.mixers.experts import SortedGLU, SortedMLP
from mlxtune.backend.models.mixers.gated_delta import gated_delta_update
from mlxtune.backend.models.mixers.rwkv7 import ChunkedTimeMixing
from mlxtune.backend.models.mixers.selective_scan import Mamba
from mlxtune.backend.models.replaced import Replacements, subclasses
from mlxtune.backend.models.windows import create_attention_mask

MAMBAS = jamba.JambaMambaMixer, mamba.MambaBlock
# By the identity of what is replaced.
FUNCTIONS: dict[int, Any] = {
    id(base.create_attention_mask): create_attention_mask,
    id(base.scaled_dot_product_attention): scaled_dot_product_attention,
    id(mlx_lm_gated_delta.gated_delta_update): gated_delta_update,
    id(ssm.ssm_update): state_space.ssm_update,
}
KINDS: dict[type, type] = {
    **subclasses(DepthwiseConv1d, nn.Conv1d),
    **subclasses(ChunkedTimeMixing, rwkv7.Rwkv7TimeMixing),
    **subclasses(Mamba, *MAMBAS),
    **subclasses(SortedGLU, SwitchGLU),
    **subclasses(SortedMLP, SwitchMLP),
}

MIXERS = Replacements(FUNCTIONS, KINDS)
