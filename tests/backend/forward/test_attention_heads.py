"""Attention layers that run by kernels: which ones do, and that nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxtune.backend.forward import attention_heads
from mlxtune.backend.forward.attention_heads import find_attention_heads
from mlxtune.backend.forward.kernels.attention_kernels import (
    Heads,
    HeadSizes,
    plain_packed,
    plain_padded,
)
from mlxtune.backend.forward.kernels.attention_trial import KernelsFor
from mlxtune.backend.forward.operations import MlxOperations
from mlxtune.backend.forward.packed_mixers import Mixers
from mlxtune.backend.models.loading import load_base
from tests.backend.step.executions import (
    PACKED,
    assert_same,
    computed,
    fixed_step,
    fresh,
    model_folder,
)
from tests.long.architectures import ARCHITECTURES
from tests.models import write_model
from tests.slow import slow

# The number of layers of each architecture that kernels can run, and of all layers.
STANDARD = {"llama": (2, 2), "qwen3": (2, 2), "gemma3_text": (3, 3), "qwen3_moe": (2, 2)}
# One layer of each has no rotary embedding.
MIXED = {"smollm3": (1, 2), "exaone4": (1, 2)}
# Bounded scores, norms over all heads, partly rotated heads with other parts, sinks.
OTHERS = dict.fromkeys(("gemma2", "olmo2", "stablelm", "gpt_oss"), (0, 2))


class Counted:
    """Stands in for kernels: MLX's operations, with the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def padded(self, *args: Any) -> tuple[mx.array, mx.array, mx.array]:
        self.calls += 1
        return plain_padded(*args)

    packed = staticmethod(plain_packed)


class WithKernels(MlxOperations):
    """A GPU's operations, with kernels for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = Counted()

    def attention_kernels(self, dtype: mx.Dtype | None) -> KernelsFor:
        return lambda heads: self.kernels  # type: ignore[return-value]


def mixers_of(model: nn.Module) -> Iterator[nn.Module]:
    model.freeze()
    for layer in model.layers:
        yield next(each for each in layer.children().values() if "q_proj" in each)


@pytest.mark.parametrize(
    ("architecture", "counts"),
    [*STANDARD.items(), *(slow(*each) for each in (MIXED | OTHERS).items())],
)
def test_layers_that_kernels_can_run_are_found(
    architecture: str, counts: tuple[int, int], tmp_path: Any
) -> None:
    folder = write_model(tmp_path / "m", architecture, **ARCHITECTURES[architecture])
    found = [find_attention_heads(each) for each in mixers_of(load_base(folder, "float32").model)]
    assert (sum(each is not None for each in found), len(found)) == counts


@pytest.fixture
def attention(tmp_path: Any) -> nn.Module:
    return next(mixers_of(load_base(write_model(tmp_path / "m", "qwen3"), "float32").model))


def test_heads_have_the_sizes_norms_and_angles_of_the_layer(attention: nn.Module) -> None:
    attention.q_norm.weight = mx.arange(attention.q_norm.weight.size) / 4
    found = find_attention_heads(attention)
    assert found is not None
    size = attention.q_norm.weight.size
    assert found.sizes == HeadSizes(attention.n_heads, attention.n_kv_heads, size, size)
    assert found.norms is not None
    assert mx.allclose(found.norms[:size], attention.q_norm.weight, rtol=1e-6)
    base = attention.rope.base
    assert found.frequencies == pytest.approx([base ** (-2 * i / size) for i in range(size // 2)])


def test_layer_of_custom_model_code_is_not_replaced(attention: nn.Module) -> None:
    """A trial on a few tokens cannot tell what it does to later ones."""
    attention.__class__ = type("Own", (type(attention),), {"__module__": "model_file"})
    assert find_attention_heads(attention) is None


def test_layer_that_does_anything_else_is_left_alone(attention: nn.Module) -> None:
    class Bounded(type(attention)):  # type: ignore[misc]
        """Attention that also bounds its output, which only a trial can tell."""

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return mx.tanh(super().__call__(x, mask, cache))

    attention.__class__ = Bounded
    assert find_attention_heads(attention) is None
    Bounded.__module__ = "mlx_lm.models.qwen3"
    assert find_attention_heads(attention) is None
    attention.__class__ = type(attention).__mro__[1]
    assert find_attention_heads(attention) is not None
    attention.rope.traditional = True
    assert find_attention_heads(attention) is None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", slow("llama"), slow("gemma3_text")])
def test_step_by_kernels_equals_the_plain_one(architecture: str, recompute: bool) -> None:
    folder, operations = model_folder(architecture), WithKernels()
    how = replace(PACKED, operations=operations, recompute=recompute)
    found = computed(fresh(folder, how, 10_000), fixed_step())
    assert_same(found, computed(fresh(folder), fixed_step()))
    assert operations.kernels.calls >= 2


def test_arrays_that_kernels_do_not_serve_run_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_heads, "supports_attention", lambda *_: False)
    folder, operations = model_folder("qwen3"), WithKernels()
    made = fresh(folder, replace(PACKED, operations=operations), 10_000)
    assert_same(computed(made, fixed_step()), computed(fresh(folder), fixed_step()))
    assert operations.kernels.calls == 0


def test_heads_that_kernels_do_not_pay_for_run_plainly(attention: nn.Module) -> None:
    def none(heads: Heads) -> None:
        assert heads.sizes.is_supported

    assert attention_heads.kernel_attention(attention, none) is None
    assert Mixers.__init__.__kwdefaults__["kernels"] is None
