"""Compares an export's logits with the trained model's, and measures the effect of rounding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.generate import generate_step

from mlxtune.backend.adapters.attach import AdapterSwitch
from mlxtune.backend.adapters.certificate import Comparison, Logits
from mlxtune.backend.lora.apply import adapted_modules
from mlxtune.backend.lora.targets import PROJECTIONS
from mlxtune.backend.models.token_array import TokenArrays

NEW_TOKENS = 64
# The number of positions compared at the end of a sequence, unless the answer is longer.
_MIN_POSITIONS = 128
# The tolerance as a multiple of the effect of rounding each product once: products are sums of many
# terms, which tools add in different orders.
_MARGIN = 4
# The largest relative error of one rounding.
_UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class SequenceLogits:
    """A prompt and the trained model's greedy answer, which is the last `generated` of `tokens`.

    `logits`, float32 (T, V), are the trained model's predictions of the last T tokens.
    """

    tokens: list[int]
    generated: int
    logits: Logits


@dataclass(frozen=True)
class Reference:
    """The trained model's outputs for comparison.

    `dtype` is the coarsest dtype involved, `tolerance` the largest logit difference that rounding
    explains, `effect` the largest that the adapter causes.
    """

    sequences: list[SequenceLogits]
    dtype: str
    tolerance: float = 0.0
    effect: float = 0.0


class _Rounded(nn.Module):
    """Wraps a module and moves each output by one rounding error, up or down at random."""

    def __init__(self, module: nn.Module, unit: float, key: mx.array) -> None:
        super().__init__()
        self._inner, self._unit, self._key = module, unit, key

    def __call__(self, *args: mx.array, **kwargs: mx.array) -> mx.array:
        y = self._inner(*args, **kwargs)
        up = mx.random.bernoulli(0.5, y.shape, key=self._key)
        return (y.astype(mx.float32) * mx.where(up, 1 + self._unit, 1 - self._unit)).astype(y.dtype)

    @property
    def weight(self) -> mx.array:
        """The wrapped module's weight, which some models read directly."""
        return self._inner.weight


def reference_of(
    adapted: AdapterSwitch, prompts: Sequence[Sequence[int]], rounding: str, *, everywhere: bool
) -> Reference:
    """Return the trained model's outputs for prompts, and the tolerance for rounding.

    `rounding` is the dtype of the written tensors. With `everywhere`, the tolerance allows for
    rounding in all projections, otherwise only in projections with LoRA.
    """
    sequences, ids = [], TokenArrays(adapted.model)
    for prompt in prompts:
        # The greedy continuation does not stop at the end of a turn.
        steps = generate_step(ids.array(list(prompt)), adapted.model, max_tokens=NEW_TOKENS)
        answer = [token for token, _ in steps]
        tokens = [*prompt, *answer]
        logits = _logits(adapted.model, tokens, len(answer))
        sequences.append(SequenceLogits(tokens, len(answer), logits))
    reference = Reference(sequences, coarsest(rounding, adapted.base.dtype))
    adapted.use_adapter(False)
    effect = compare_logits(adapted.model, reference).largest_difference
    adapted.use_adapter(True)
    selected = _matmuls(adapted.model) if everywhere else dict(adapted.modules)
    unit = max(_UNIT_ROUNDOFF[reference.dtype], _matmul_roundoff())
    keys = mx.random.split(mx.random.key(0), len(selected))
    rounded = [
        (path, _Rounded(module, unit, key))
        for (path, module), key in zip(selected.items(), keys, strict=True)
    ]
    adapted.model.update_modules(tree_unflatten(rounded))
    off = compare_logits(adapted.model, reference).largest_difference
    adapted.model.update_modules(tree_unflatten(list(selected.items())))
    return replace(reference, tolerance=_MARGIN * off, effect=effect)


def compare_logits(model: nn.Module, reference: Reference) -> Comparison:
    """Compare a model's logits with the reference's."""
    comparison = Comparison()
    for sequence in reference.sequences:
        logits = _logits(model, sequence.tokens, sequence.generated)
        comparison.add(sequence.logits, logits, sequence.generated)
    return comparison


def _logits(model: nn.Module, tokens: list[int], generated: int) -> Logits:
    positions = max(_MIN_POSITIONS, generated)
    ids = TokenArrays(model).array([tokens[:-1]])
    return np.array(model(ids)[0, -positions:].astype(mx.float32))


def _matmuls(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's projections by path; a LoRA layer counts, but not the layer inside it."""
    adapted = adapted_modules(model)
    inner = {f"{path}.linear" for path in adapted}
    return {
        path: module
        for path, module in model.named_modules()
        if path in adapted or (isinstance(module, PROJECTIONS) and path not in inner)
    }


def _matmul_roundoff() -> float:
    """Return the relative error of a float32 matmul on this device, which may use fewer bits."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.array(mx.array(a) @ mx.array(b)) - exact
    return float(np.sqrt((error**2).mean() / (exact**2).mean()))


def coarsest(*dtypes: str) -> str:
    """Return the coarsest floating-point dtype among these names; float32 if there is none."""
    floats = [name for name in dtypes if name in _UNIT_ROUNDOFF]
    return max(floats, key=_UNIT_ROUNDOFF.__getitem__, default="float32")
