"""The storage formats of fused projections, and their names in a config."""

from __future__ import annotations

from typing import Any

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from mlxtune.backend.adapters.storage import AS_BASE, PLAIN, add_to_config, layer_like, storages_for
from mlxtune.backend.models.stored_layers import dequantized_weight


def quantized(bits: int, group: int = 64, mode: str = "affine", bias: bool = True) -> Any:
    return nn.Linear(128, 32, bias).to_quantized(group_size=group, bits=bits, mode=mode)


@pytest.mark.parametrize(
    ("modules", "storages"),
    [
        ([nn.Linear(128, 32)], [AS_BASE]),
        ([], [AS_BASE]),
        ([quantized(4)], [AS_BASE, "in 6 bits", "in 8 bits", PLAIN]),
        ([quantized(8), nn.Linear(128, 32)], [AS_BASE, PLAIN]),
        ([quantized(6), quantized(8)], [AS_BASE, "in 8 bits", PLAIN]),
    ],
)
def test_storages_have_more_bits_one_after_the_other(
    modules: list[nn.Module], storages: list[str]
) -> None:
    assert storages_for(modules) == storages


@pytest.mark.parametrize(
    ("module", "storage", "expected"),
    [
        (quantized(4), AS_BASE, (64, 4, "affine")),
        (quantized(4), "in 6 bits", (64, 6, "affine")),
        # Affine groups have at least 32 entries; nvfp4's groups have 16.
        (quantized(4, 16, "nvfp4", bias=False), "in 6 bits", (32, 6, "affine")),
        (quantized(8, 32), "in 6 bits", (32, 8, "affine")),
        (quantized(4), PLAIN, None),
        (nn.Linear(128, 32), "in 6 bits", None),
    ],
)
def test_layer_is_stored_as_named(module: Any, storage: str, expected: Any) -> None:
    weight = mx.random.normal((32, 128))
    made: Any = layer_like(module, weight, storage)
    if expected is None:
        assert type(made) is nn.Linear
        assert mx.array_equal(made.weight, weight)
    else:
        assert (made.group_size, made.bits, made.mode) == expected
        wanted = mx.dequantize(
            *mx.quantize(weight, expected[0], expected[1], mode=expected[2]),
            group_size=expected[0],
            bits=expected[1],
            mode=expected[2],
        )
        assert mx.array_equal(dequantized_weight(made), wanted)
    assert ("bias" in made) == ("bias" in module)


def test_experts_are_stored_alike() -> None:
    module = SwitchLinear(128, 32, 3, bias=False).to_quantized(group_size=64, bits=4)
    made: Any = layer_like(module, mx.random.normal((3, 32, 128)), "in 8 bits")
    assert (made.bits, made.num_experts) == (8, 3)


def test_config_names_what_differs_from_the_base() -> None:
    base = {"group_size": 64, "bits": 4, "mode": "affine"}
    layers = [("q", quantized(4)), ("plain", nn.Linear(128, 32))]

    def config_for(storage: str) -> Any:
        config = {"quantization": dict(base), "quantization_config": dict(base), "other": 1}
        made = [
            (path, each, layer_like(each, mx.zeros((32, 128)), storage)) for path, each in layers
        ]
        add_to_config(config, made, storage)
        assert config["quantization"] == config["quantization_config"]
        return config["quantization"]

    assert config_for(AS_BASE) == base
    assert config_for("in 6 bits") == base | {"q": {"group_size": 64, "bits": 6, "mode": "affine"}}
    assert config_for(PLAIN) == base | {"q": False}
