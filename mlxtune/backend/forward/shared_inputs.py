"""Finds a model's projections that share an input, by running the model on a few tokens."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.forward.intercept import intercept
from mlxtune.backend.forward.layer_calls import first_trained
from mlxtune.backend.lora.joined import MOST_COLUMNS, SharedInput
from mlxtune.backend.lora.layers import LoRALinear
from mlxtune.backend.workers.split import Split

_TOKENS = 4
# The called projections of each parent module, in the order of calls, each with its input.
_Calls = dict[str, list[tuple[nn.Module, mx.array]]]


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
            module.input_dtype = x.dtype
    for group in (group for each in calls.values() for group in _groups(each)):
        shared = SharedInput(group)
        for number, module in enumerate(group):
            if isinstance(module, LoRALinear):
                module.shared, module.number = shared, number
                sharing.append(module)
            else:
                frozen.append((module, partial(_run, shared, number)))
    undo_frozen = intercept(model, *zip(*frozen, strict=True)) if frozen else lambda: None

    def undo() -> None:
        undo_frozen()
        for module in sharing:
            module.shared = None

    return undo


def _run(shared: SharedInput, number: int, module: nn.Module, x: mx.array) -> mx.array:
    return shared.output(number, x) if shared.runs else module(x)


def _tried(model: nn.Module) -> _Calls:
    """Run the model on a few tokens; return the calls of trained layers' projections by parent."""
    names = {id(module): name for name, module in model.named_modules()}
    inner = {id(m.linear) for m in model.modules() if isinstance(m, LoRALinear)}
    # Layers below the first trained layer have no gradient.
    layers = list(model.layers)[first_trained(model.layers) :]
    every = [module for layer in layers for module in layer.modules()]
    chosen = [m for m in every if type(m) in (LoRALinear, nn.Linear) and id(m) not in inner]
    calls: _Calls = {}

    def record(module: nn.Module, x: mx.array) -> mx.array:
        calls.setdefault(names[id(module)].rpartition(".")[0], []).append((module, x))
        output: mx.array = module(x)
        return output

    restore = intercept(model, chosen, [record] * len(chosen))
    try:
        getattr(model, "language_model", model)(mx.arange(_TOKENS)[None])
    finally:
        restore()
    return calls


def _runs_alone(module: nn.Module) -> bool:
    """Return whether a projection has dropout, PiSSA's factors, or parts on several workers."""
    return isinstance(module, LoRALinear) and (
        module.has_dropout or module.principal is not None or isinstance(module.linear, Split)
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
        alike = len({module.scale for module in with_lora}) < 2 and columns <= MOST_COLUMNS
        once = len({id(module) for module in group}) == len(group)
        if len(group) > 1 and alike and once:
            yield group
