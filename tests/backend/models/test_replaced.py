"""Functions replaced in one model: its methods call them, and other models are unchanged."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.models.replaced import Replacements, subclasses


def double(x: mx.array) -> mx.array:
    return 2 * x


def triple(x: mx.array) -> mx.array:
    return 3 * x


class Mixer(nn.Module):
    def __call__(self, x: mx.array, *, more: bool = False) -> mx.array:
        return self._recur(x) + more

    def _recur(self, x: mx.array) -> mx.array:
        return double(nn.relu(x))


class Derived(Mixer):
    pass


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Mixer) -> None:
        super().__init__()
        self.mixer, self.norm = kind(), nn.RMSNorm(2)


X = mx.array([1.0, -1.0])


def test_functions_called_by_any_method_are_replaced() -> None:
    for kind in (Mixer, Derived):
        model, other = Model(kind), Model(kind)
        Replacements({id(double): triple}, {}).apply(model)
        assert model.mixer(X, more=True).tolist() == [4, 1]
        assert other.mixer(X).tolist() == [2, 0]
        assert isinstance(model.mixer, kind)
        assert type(model.norm) is nn.RMSNorm


def test_layer_becomes_one_of_the_given_kind() -> None:
    class Doubled(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    model = Model()
    plain = model.norm(X)
    Replacements({}, subclasses(Doubled, nn.RMSNorm)).apply(model)
    assert mx.array_equal(model.norm(X), 2 * plain)


def test_undoing_replacements_in_order_restores_each() -> None:
    model = Model()
    first = Replacements({id(double): triple}, {}).apply(model)
    second = Replacements({id(triple): lambda x: -x}, {}).apply(model)
    assert model.mixer(X).tolist() == [-1, 0]
    second()
    assert model.mixer(X).tolist() == [3, 0]
    first()
    assert type(model.mixer) is Mixer
    assert model.mixer(X).tolist() == [2, 0]
