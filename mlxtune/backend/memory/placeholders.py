"""Copies of layers without weights, to trace."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from mlxtune.backend.models.layers import StoredExperts, StoredLinear, replace_modules
from mlxtune.backend.workers.split import Part, Split


def placeholder(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """Return a copy of a layer whose arrays are placeholders, with plain matrices for stored ones.

    What unpacking or casting these takes is counted apart.
    """
    arrays = [value for _, value in tree_flatten(model.parameters())]
    memo: dict[int, Any] = {id(value): mx.zeros(value.shape, value.dtype) for value in arrays}
    for module in model.modules():
        memo |= {id(v): v for v in vars(module).values() if isinstance(v, mx.Dtype | Part)}
    copied = copy.deepcopy(model, memo)

    def plain(module: nn.Module) -> nn.Module | None:
        if isinstance(module, StoredExperts):
            count, outputs, inputs = module.weight.shape
            experts = SwitchLinear(inputs, outputs, count, bias="bias" in module)
            experts.set_dtype(dtype)
            return experts
        if not (isinstance(module, StoredLinear) or hasattr(module, "unpacked")):
            return None
        outputs, inputs = module.weight.shape
        if "scales" in module:
            inputs = inputs * 32 // module.bits
        linear = nn.Linear(inputs, outputs, bias="bias" in module)
        linear.set_dtype(dtype)
        return module.like(linear) if isinstance(module, Split) else linear

    replace_modules(copied, plain)
    return copied


def forget(layer: nn.Module) -> None:
    """Put placeholders for what is computed from weights once, and not in a step."""
    for module in layer.modules():
        private = {k: v for k, v in module.items() if k[0] == "_" and isinstance(v, mx.array)}
        dict.update(module, {k: mx.zeros(v.shape, v.dtype) for k, v in private.items()})
