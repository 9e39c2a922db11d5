"""Replaces functions and layers in one model, without changing shared classes."""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

# The default activations of experts: all models share these objects, so they stay unchanged.
_SHARED_DEFAULTS = {
    id(each) for kind in (SwitchGLU, SwitchMLP) for each in kind.__init__.__defaults__
}


class Replacements:
    """The functions and layers that a model uses instead of mlx-lm's and MLX's own.

    `functions` maps the `id` of a function that modules call by name to its replacement; `kinds`
    maps a layer class to its subclass.
    """

    def __init__(self, functions: Mapping[int, Any], kinds: Mapping[type, type]) -> None:
        self.functions, self.kinds = functions, kinds
        self._replacements: dict[type, type | None] = {}

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Make a model's modules use the replacements; return a function that undoes the change."""
        changed: list[tuple[Any, type]] = []
        for _, part in model.named_modules():
            kind = type(part)
            replaced = self._subclass(kind)
            if replaced is not None and id(part) not in _SHARED_DEFAULTS:
                changed.append((part, kind))
                # The module stays the same object and gets another class: the model itself has no
                # parent in which to replace it, and adapters keep references to their modules.
                part.__class__ = replaced

        def undo() -> None:
            for part, kind in changed:
                part.__class__ = kind

        return undo

    def _subclass(self, kind: type) -> type | None:
        """Return a subclass that uses the replacements; None if none applies."""
        if kind not in self._replacements:
            methods = self.kinds.get(kind)
            self._replacements[kind] = self._with_functions(methods or kind) or methods
        return self._replacements[kind]

    def _with_functions(self, kind: type) -> type | None:
        methods: dict[str, Any] = {}
        for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
            methods.update(vars(base))
        copies = {name: self._copy(method) for name, method in methods.items()}
        copies = {name: copy for name, copy in copies.items() if copy is not None}
        if not copies:
            return None
        return type(kind.__name__, (kind,), {**copies, "__module__": kind.__module__})

    def _copy(self, method: Any) -> FunctionType | None:
        """Return a copy of a method that calls the replacements; None if it calls none."""
        if not isinstance(method, FunctionType):
            return None
        replaced = {
            name: self.functions[id(value)]
            for name in method.__code__.co_names
            if id(value := method.__globals__.get(name)) in self.functions
        }
        if not replaced:
            return None
        # Methods look functions up in the globals of their Python module. Replacing them there
        # would change every model in the process, so the copy gets separate globals.
        own = {**method.__globals__, **replaced}
        copy = FunctionType(
            method.__code__, own, method.__name__, method.__defaults__, method.__closure__
        )
        copy.__kwdefaults__ = method.__kwdefaults__
        return copy


def subclasses(mixin: type, *kinds: type) -> dict[type, type]:
    """Return a subclass of each class, with the mixin as its first base."""
    return {kind: type(kind.__name__, (mixin, kind), {}) for kind in kinds}
