"""SwiGLU in MLPs, by kernels or by MLX's operations with a cheaper gradient than MLX's own."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.forward.intercept import intercept
from mlxtune.backend.forward.kernels.gate_kernels import gate_kernels, supports_gates
from mlxtune.backend.forward.kernels.gate_kernels import plain_swiglu as plain_swiglu
from mlxtune.backend.models.autograd import is_exporting

# The largest accepted difference between the outputs of an MLP and of SwiGLU in a trial.
_TOLERANCE = 1e-5


def replace_gates(model: nn.Module) -> Callable[[], None]:
    """Make MLPs that compute SwiGLU use `swiglu`; return a function that undoes the change."""
    kinds: dict[type, bool] = {}
    selected: list[nn.Module] = []
    for _, module in model.named_modules():
        if set(module.children()) >= _TRIAL.keys():
            if type(module) not in kinds:
                kinds[type(module)] = _computes_swiglu(module)
            selected += [module] * kinds[type(module)]
    return intercept(model, selected, [_run] * len(selected))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, arXiv:2002.05202, section 2."""
    # Exported graphs must not contain custom kernels.
    by_kernels = None
    if supports_gates(gate, up) and not is_exporting():
        by_kernels = gate_kernels(gate.dtype)
    return (by_kernels or plain_swiglu)(gate, up)


def _run(mlp: nn.Module, x: mx.array) -> mx.array:
    output: mx.array = mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))
    return output


# These functions replace an MLP's projections in a trial, to reveal the function between them.
_TRIAL: dict[str, Callable[[mx.array], mx.array]] = {
    "gate_proj": lambda x: 2 * x + 1,
    "up_proj": lambda x: 3 * x - 1,
    "down_proj": lambda x: x + 2,
}


def _computes_swiglu(mlp: nn.Module) -> bool:
    projections = {name: mlp[name] for name in _TRIAL}
    x = mx.linspace(-5, 5, 16).reshape(1, 4, 4)
    # Kernels are not tried here: the model may never use them in float32.
    gate, up, down = _TRIAL.values()
    try:
        dict.update(mlp, _TRIAL)
        expected = down(plain_swiglu(gate(x), up(x)))
        return bool(mx.allclose(mlp(x), expected, rtol=_TOLERANCE, atol=_TOLERANCE))
    # Any error may occur: experts, for example, take arguments besides hidden states.
    except Exception:  # noqa: BLE001
        return False
    finally:
        dict.update(mlp, projections)
