"""The functions and layers of mlx-lm's models that this folder replaces."""

from typing import Any

from mlx_lm.models import base, ssm
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from mlxtune.backend.models.mixers import experts, recurrences
from mlxtune.backend.models.mixers.attention import scaled_dot_product_attention
from mlxtune.backend.models.mixers.gated_delta import gated_delta_update
from mlxtune.backend.models.packed import create_attention_mask
from mlxtune.backend.models.replaced import Replacements

# Keyed by the `id` of the replaced function.
FUNCTIONS: dict[int, Any] = {
    id(base.create_attention_mask): create_attention_mask,
    id(base.scaled_dot_product_attention): scaled_dot_product_attention,
    id(mlx_lm_gated_delta.gated_delta_update): gated_delta_update,
    id(ssm.ssm_update): recurrences.ssm_update,
}
KINDS: dict[type, type] = {**experts.KINDS, **recurrences.KINDS}

MIXERS = Replacements(FUNCTIONS, KINDS)
