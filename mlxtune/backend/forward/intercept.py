"""Intercepts the calls of a model's modules."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten


class Intercepted(nn.Module):
    """Replaces a module of a model, and runs `call(module, *args, **options)` in its place.

    The replacement has the module's children, parameters and attributes, so that names stay
    unchanged, and is an instance of the module's class, because some models choose a layer's mask
    by the layer's class.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__.update(module.__dict__)
        dict.update(self, module)
        # Bypasses Module's own __setattr__, which would make the module a child.
        object.__setattr__(self, "_intercepted", module)
        object.__setattr__(self, "_call", call)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The module's class, which `isinstance` finds in addition to `Intercepted`."""
        return type(object.__getattribute__(self, "_intercepted"))

    def __call__(self, *args: Any, **options: Any) -> Any:
        # Children may have been replaced since the last call, as when an adapter is switched off.
        dict.update(self._intercepted, self)
        return self._call(self._intercepted, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self._intercepted, name)


def intercept(
    model: nn.Module, modules: Sequence[nn.Module], calls: Sequence[Callable[..., Any]]
) -> Callable[[], None]:
    """Make each module run its function in `calls`; return a function that undoes the change."""
    replaced = [Intercepted(module, call) for module, call in zip(modules, calls, strict=True)]
    put_in_place(model, modules, replaced)
    return lambda: put_in_place(model, replaced, modules)


def put_in_place(
    model: nn.Module, modules: Sequence[nn.Module], replaced: Sequence[nn.Module]
) -> None:
    """Put each module of `replaced` at the path of the matching module in `modules`."""
    names = {id(module): name for name, module in model.named_modules()}
    pairs = zip(modules, replaced, strict=True)
    model.update_modules(tree_unflatten([(names[id(old)], new) for old, new in pairs]))
