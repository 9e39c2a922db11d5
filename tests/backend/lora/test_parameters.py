"""Trained parameters by name, against MLX's own walk through the model."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.forward.intercept import intercept
from mlxtune.backend.lora.parameters import TrainedParameters


@pytest.fixture
def model() -> nn.Module:
    made = nn.Module()
    made.layers = [nn.Linear(2, 3), nn.Linear(3, 2, bias=False)]
    made.norm = nn.RMSNorm(2)
    made.norm.freeze()
    return made


def test_parameters_are_the_unfrozen_ones_in_model_order(
    model: nn.Module,
) -> None:
    found = TrainedParameters(model).values()
    expected = tree_flatten(model.trainable_parameters())
    assert list(found) == [name for name, _ in expected]
    assert all(found[name] is value for name, value in expected)


def test_some_parameters_are_replaced_also_behind_an_intercepted_module(model: nn.Module) -> None:
    restore = intercept(model, [model.layers[1]], [lambda module, x: module(x)])
    parameters, weight = TrainedParameters(model), mx.ones((2, 3))
    parameters.assign({"layers.1.weight": weight})
    assert parameters.values()["layers.1.weight"] is weight
    assert mx.array_equal(model.layers[1](mx.ones((1, 3))), 3 * mx.ones((1, 2)))
    restore()


def test_replaced_parameters_return_after_an_error_too(model: nn.Module) -> None:
    parameters, weight = TrainedParameters(model), mx.ones((2, 3))
    before = parameters.values()
    with (
        pytest.raises(ValueError, match="inside"),
        parameters.replaced({"layers.1.weight": weight}),
    ):
        assert parameters.values()["layers.1.weight"] is weight
        raise ValueError("inside")
    assert all(parameters.values()[name] is value for name, value in before.items())


def test_name_of_another_parameter_is_an_error(model: nn.Module) -> None:
    with pytest.raises(KeyError, match=r"norm\.weight"):
        TrainedParameters(model).assign({"norm.weight": mx.ones(2)})
