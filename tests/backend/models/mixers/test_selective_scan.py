"""Mamba's recurrence and its gradients, against mlx-lm's mixers, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import jamba, mamba

from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.models.mixers.selective_scan import scan
from mlxtune.core.steps.execution import Operations
from tests.backend.cpu.compared import assert_close, random
from tests.backend.kernels import kernel_module

cpu_scan = kernel_module("state_space").selective_scan


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled() -> Iterator[None]:
    # mlx-lm compiles parts of its own, with a C++ compiler on the CPU.
    mx.disable_compile()
    yield
    mx.enable_compile()


def by_tokens(x: Any, dt: Any, A: Any, B: Any, C: Any, state: Any) -> tuple[Any, Any]:
    """Return what the recurrence gives, arXiv:2312.00752, equation 2, in float64."""
    x, dt, A, B, C, state = (each.astype(mx.float64) for each in (x, dt, A, B, C, state))
    ys = []
    for t in range(x.shape[1]):
        state = mx.exp(dt[:, t, :, None] * A) * state
        state = state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        ys.append((state * C[:, t, None]).sum(axis=-1))
    return mx.stack(ys, axis=1), state


def results(function: Callable[..., Any], varied: list[mx.array], A: mx.array) -> list[Any]:
    """Return y, the last state, and the gradients of a sum of both."""
    dtype = mx.float64 if function is by_tokens else mx.float32

    def run(x: mx.array, dt: mx.array, B: mx.array, C: mx.array, state: mx.array) -> list[mx.array]:
        return list(function(x, dt, A, B, C, state))

    with mx.stream(mx.cpu):
        weights = [random(*varied[i].shape, seed=9).astype(dtype) for i in (0, 4)]
        outputs, gradients = mx.vjp(run, varied, weights)
        return [np.array(each.astype(mx.float64)) for each in (*outputs, *gradients)]


@pytest.mark.parametrize("function", [scan, cpu_scan])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(1, 2), st.integers(1, 80), st.sampled_from([1.0, 30.0]))
def test_recurrence_and_its_gradients(
    function: Callable[..., Any], batch: int, length: int, scale: float
) -> None:
    x, B, C = random(batch, length, 6), random(batch, length, 4), random(batch, length, 4, seed=1)
    dt = mx.abs(random(batch, length, 6, scale=scale, seed=1))
    varied = [x, dt, B, C, random(batch, 6, 4)]
    A = -mx.broadcast_to(mx.arange(1.0, 5.0), (6, 4))
    for one, other in zip(results(function, varied, A), results(by_tokens, varied, A), strict=True):
        assert_close(one, other, 1e-5)


class Model(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer


def mixers() -> dict[str, nn.Module]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 9}
    config = {"conv_kernel": 4, "state_size": 4, "use_bias": False, "use_conv_bias": True}
    config = {**sizes, **config, "time_step_rank": 2}
    layer = {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1}
    layer |= {"expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 4, "mamba_expand": 2}
    layer |= {"num_attention_heads": 2, "num_key_value_heads": 2, "mamba_dt_rank": 2}
    layer |= {"num_experts": 2, "num_experts_per_tok": 1, "mamba_proj_bias": False}
    layer |= {"mamba_conv_bias": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 9}
    plain = mamba.ModelArgs.from_dict({"model_type": "mamba", **config})
    falcon = mamba.ModelArgs.from_dict({"model_type": "falcon_mamba", **config})
    other = jamba.ModelArgs.from_dict({"model_type": "jamba", **sizes, **layer})
    return {
        "mamba": mamba.MambaBlock(plain),
        "falcon_mamba": mamba.MambaBlock(falcon),
        "jamba": jamba.JambaMambaMixer(other),
    }


@pytest.mark.parametrize("operations", [MLX, CPU], ids=["mlx", "cpu"])
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
def test_mixer_gives_what_mlx_lms_gives(name: str, operations: Operations) -> None:
    model = Model(mixers()[name])
    random_weights = [
        (key, random(*value.shape, scale=0.5, seed=i))
        for i, (key, value) in enumerate(tree_flatten(model.parameters()))
    ]
    model.load_weights(random_weights)
    x, weight = random(2, 40, 16), random(2, 40, 16, seed=1)

    def loss(x: mx.array) -> mx.array:
        return (model.mixer(x, None) * weight).sum()

    # With states that another call left, too.
    caches = [[None, None], [None, None]]
    wanted = model.mixer(x, caches[0]), model.mixer(x, caches[0]), mx.grad(loss)(x)
    operations.prepare(model)
    found = model.mixer(x, caches[1]), model.mixer(x, caches[1]), mx.grad(loss)(x)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 1e-5)
