"""SwiGLU and its gradient against MLX's, and the MLPs that use it."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gemma3_text, llama, qwen3_moe

from mlxtune.backend.forward.gates import replace_gates, swiglu
from mlxtune.backend.forward.intercept import Intercepted


class Model(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-6), (mx.bfloat16, 2e-2)])
def test_swiglu_and_its_gradient(dtype: mx.Dtype, tolerance: float) -> None:
    keys = mx.random.split(mx.random.key(0), 3)
    gate, up, weight = (4 * mx.random.normal((2, 5, 7), key=key) for key in keys)

    def plain(gate: mx.array, up: mx.array) -> mx.array:
        return (nn.silu(gate) * up * weight).sum()

    def ours(gate: mx.array, up: mx.array) -> mx.array:
        return (swiglu(gate.astype(dtype), up.astype(dtype)).astype(mx.float32) * weight).sum()

    wanted = mx.value_and_grad(plain, argnums=(0, 1))(gate, up)
    found = mx.value_and_grad(ours, argnums=(0, 1))(gate, up)
    assert mx.allclose(found[0], wanted[0], rtol=10 * tolerance)
    for one, other in zip(found[1], wanted[1], strict=True):
        assert mx.abs(one - other).max() <= tolerance * mx.abs(other).max()


def test_mlp_with_silu_is_replaced_and_computes_the_same() -> None:
    mlp = llama.MLP(llama.ModelArgs("llama", 16, 1, 24, 2, 1e-6, 50))
    model, x = Model(mlp), mx.random.normal((1, 3, 16), key=mx.random.key(1))
    wanted = model.mlp(x)
    undo = replace_gates(model)
    assert isinstance(model.mlp, Intercepted)
    assert mx.allclose(model.mlp(x), wanted, rtol=1e-5, atol=1e-7)
    undo()
    assert model.mlp is mlp


def test_other_activations_and_experts_are_left_alone() -> None:
    gelu = gemma3_text.MLP(16, 24)
    experts = qwen3_moe.SwitchGLU(16, 24, 4)
    for mlp in (gelu, experts):
        model, projections = Model(mlp), dict(mlp.items())
        replace_gates(model)
        assert model.mlp is mlp
        assert dict(mlp.items()) == projections
