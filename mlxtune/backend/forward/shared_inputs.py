"""Finds a model's projections that share an input, and runs them with one matmul of all As."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.forward.intercept import intercept
from mlxtune.backend.forward.layer_calls import first_trained
from mlxtune.backend.lora.lora_layers import LoRALinear, matmul_over_tokens
from mlxtune.backend.models.autograd import differentiable, is_exporting
from mlxtune.backend.models.stored_layers import frozen_gradient, is_plain
from mlxtune.backend.workers.shards import ShardedLinear

_TRIAL_TOKENS = 4
# The called projections of each parent module, in the order of calls, each with its input.
_Calls = dict[str, list[tuple[nn.Module, mx.array]]]

# The maximum number of columns of joined A matrices. A GPU multiplies tiles of this width, so
# padding each B with zeros costs no time.
MAX_COLUMNS = 64


class SharedInput:
    """Projections that a layer calls one after the other with the same input.

    The first call computes all outputs, and keeps those of the other projections for the next
    calls. `members` are the projections with LoRA. In a step, the first member's `lora_a` (in, R)
    holds all their A matrices side by side, and each `lora_b` (R, out) has zeros in the other
    members' rows:

        A  = (A1 | A2)      B1' = (B1 / 0)      B2' = (0 / B2)      y1 = W1 x + scale * (x A) B1'
    """

    def __init__(self, projections: Sequence[nn.Module]) -> None:
        self.projections = list(projections)
        self.members = [
            projection for projection in projections if isinstance(projection, LoRALinear)
        ]
        self._columns = sum(member.lora_a.shape[1] for member in self.members)
        self._run = differentiable(self._forward, self._backward)
        self._x: mx.array | None = None
        self._kept: dict[int, mx.array] = {}

    @property
    def is_joined(self) -> bool:
        """Whether all projections run together: A matrices are joined, or at most one has LoRA."""
        return len(self.members) < 2 or self.members[0].lora_a.shape[1] == self._columns

    def output(self, number: int, x: mx.array) -> mx.array:
        """Return the output of projection `number` for x (..., in)."""
        if self._x is not x or number not in self._kept:
            self._x, self._kept = x, dict(enumerate(self._outputs(x)))
        output = self._kept.pop(number)
        if not self._kept:
            self._x = None
        return output

    def _outputs(self, x: mx.array) -> list[mx.array]:
        first = self.members[0].lora_a if self.members else None
        trained = [] if first is None else [first, *(member.lora_b for member in self.members)]
        # A function made outside an export has no gradient inside it.
        run = differentiable(self._forward, self._backward) if is_exporting() else self._run
        outputs = run(x, *(array.astype(x.dtype) for array in trained))
        return list(outputs[: len(self.projections)])

    def _forward(self, x: mx.array, *trained: mx.array) -> list[mx.array]:
        if not trained:
            return [projection(x) for projection in self.projections]
        narrow, bs = x @ trained[0], iter(trained[1:])
        outputs = [
            mx.addmm(projection.linear(x), narrow, next(bs), alpha=projection.scale)
            if isinstance(projection, LoRALinear)
            else projection(x)
            for projection in self.projections
        ]
        return [*outputs, narrow]

    def _backward(self, primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        # MLX passes a single array without a list.
        x, *trained = [primals] if isinstance(primals, mx.array) else primals
        # The last cotangent belongs to `narrow`, which only this backward pass reads.
        pairs = list(zip(self.projections, cotangents, strict=False))
        first, cotangent = pairs[0]
        d_x = frozen_gradient(_frozen(first), x, cotangent)
        for each, cotangent in pairs[1:]:
            d_x = _plus_gradient(d_x, each, cotangent, x)
        if not trained:
            return [d_x]
        (a, *bs), narrow, scale = trained, outputs[-1], self.members[0].scale
        updated = [cotangent for each, cotangent in pairs if isinstance(each, LoRALinear)]
        d_narrow = updated[0] @ bs[0].T
        for cotangent, b in zip(updated[1:], bs[1:], strict=True):
            d_narrow = mx.addmm(d_narrow, cotangent, b.T)
        return [
            mx.addmm(d_x, d_narrow, a.T, alpha=scale),
            matmul_over_tokens(x, d_narrow, scale),
            *(matmul_over_tokens(narrow, cotangent, scale) for cotangent in updated),
        ]


def _frozen(projection: nn.Module) -> nn.Module:
    return projection.linear if isinstance(projection, LoRALinear) else projection


def _plus_gradient(
    total: mx.array, projection: nn.Module, cotangent: mx.array, x: mx.array
) -> mx.array:
    """Return `total` plus the gradient with respect to x through the frozen layer."""
    linear = _frozen(projection)
    if is_plain(linear, x.dtype):
        return mx.addmm(total, cotangent, linear.weight)
    return total + frozen_gradient(linear, x, cotangent)


def share_inputs(model: nn.Module) -> Callable[[], None]:
    """Make projections that share an input run together; return a function that undoes the change.

    Also records the input dtype of projections with LoRA. A model that cannot run on a few tokens
    stays unchanged.
    """
    try:
        calls = _tried(model)
    # Any error may occur: some models need inputs other than tokens.
    except Exception:  # noqa: BLE001
        return lambda: None
    sharing: list[LoRALinear] = []
    frozen: list[tuple[nn.Module, Callable[..., Any]]] = []
    for module, x in (call for each in calls.values() for call in each):
        # With PiSSA, A and B are joined with float32 factors before the cast, so they stay float32.
        if isinstance(module, LoRALinear) and module.principal is None:
            module.expect(x.dtype)
    for group in (group for each in calls.values() for group in _groups(each)):
        shared = SharedInput(group)
        for number, module in enumerate(group):
            if isinstance(module, LoRALinear):
                module.join(shared, number)
                sharing.append(module)
            else:
                frozen.append((module, partial(_run, shared, number)))
    undo_frozen = intercept(model, *zip(*frozen, strict=True)) if frozen else lambda: None

    def undo() -> None:
        undo_frozen()
        for module in sharing:
            module.leave()

    return undo


def _run(shared: SharedInput, number: int, module: nn.Module, x: mx.array) -> mx.array:
    return shared.output(number, x) if shared.is_joined else module(x)


def _tried(model: nn.Module) -> _Calls:
    """Run the model on a few tokens; return the calls of trained layers' projections by parent."""
    names = {id(module): name for name, module in model.named_modules()}
    inner = {id(m.linear) for m in model.modules() if isinstance(m, LoRALinear)}
    # Layers below the first trained layer have no gradient.
    layers = list(model.layers)[first_trained(model.layers) :]
    every = [module for layer in layers for module in layer.modules()]
    selected = [m for m in every if type(m) in (LoRALinear, nn.Linear) and id(m) not in inner]
    calls: _Calls = {}

    def record(module: nn.Module, x: mx.array) -> mx.array:
        calls.setdefault(names[id(module)].rpartition(".")[0], []).append((module, x))
        output: mx.array = module(x)
        return output

    restore = intercept(model, selected, [record] * len(selected))
    try:
        getattr(model, "language_model", model)(mx.arange(_TRIAL_TOKENS)[None])
    finally:
        restore()
    return calls


def _runs_alone(module: nn.Module) -> bool:
    """Return whether a projection has dropout, PiSSA's factors, or parts on several workers."""
    return isinstance(module, LoRALinear) and (
        module.has_dropout
        or module.principal is not None
        or isinstance(module.linear, ShardedLinear)
    )


def _groups(calls: Sequence[tuple[nn.Module, mx.array]]) -> Iterator[list[nn.Module]]:
    """Yield groups of one module's projections that share an input and run once each."""
    inputs: dict[int, list[nn.Module]] = {}
    for module, x in calls:
        if _runs_alone(module):
            continue
        inputs.setdefault(id(x), []).append(module)
    for group in inputs.values():
        with_lora = [module for module in group if isinstance(module, LoRALinear)]
        columns = sum(module.lora_a.shape[1] for module in with_lora)
        alike = len({module.scale for module in with_lora}) < 2 and columns <= MAX_COLUMNS
        once = len({id(module) for module in group}) == len(group)
        if len(group) > 1 and alike and once:
            yield group
