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

from mlxtune.backend.adapters.storage import (
    AS_BASE,
    PLAIN,
    Storage,
    add_to_config,
    layer_like,
    storages_for,
)
from mlxtune.backend.models.stored_layers import dequantized_weight
from mlxtune.errors import ConfigError


def quantized(bits: int, group: int = 64, mode: str = "affine", bias: bool = True) -> Any:
    return nn.Linear(128, 32, bias).to_quantized(group_size=group, bits=bits, mode=mode)


NEAREST, GPTQ = "nearest", "gptq"
IN_6 = Storage("in 6 bits", 6)


@pytest.mark.parametrize(
    ("modules", "bits", "storages"),
    [
        ([nn.Linear(128, 32)], None, [(0, NEAREST)]),
        ([], None, [(0, NEAREST)]),
        (
            [quantized(4)],
            None,
            [(4, NEAREST), (4, GPTQ), (6, NEAREST), (8, NEAREST), (None, None)],
        ),
        ([quantized(8), nn.Linear(128, 32)], None, [(8, NEAREST), (8, GPTQ), (None, None)]),
        (
            [quantized(6), quantized(8)],
            None,
            [(6, NEAREST), (6, GPTQ), (8, NEAREST), (None, None)],
        ),
        # GPTQ is for the affine mode, and more bits are affine.
        (
            [quantized(4, 32, "mxfp4", bias=False)],
            None,
            [(4, NEAREST), (6, NEAREST), (8, NEAREST), (None, None)],
        ),
        ([quantized(4)], 4, [(4, NEAREST), (4, GPTQ)]),
        ([quantized(4, 32, "mxfp4", bias=False)], 5, [(5, NEAREST), (5, GPTQ)]),
    ],
)
def test_smallest_storage_comes_first(
    modules: list[nn.Module], bits: int | None, storages: list[tuple[int | None, str | None]]
) -> None:
    found = storages_for(modules, bits)
    assert [(each.bits, each.method) for each in found] == storages
    assert len({each.name for each in found}) == len(found)


@pytest.mark.parametrize(
    ("module", "problem"),
    [(quantized(6), "at least the base's 6, not 5"), (nn.Linear(128, 32), "leave it out")],
)
def test_bits_that_the_base_does_not_allow_are_an_error(module: nn.Module, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--bits .*{problem}"):
        storages_for([module], 5)


@pytest.mark.parametrize(
    ("module", "storage", "expected"),
    [
        (quantized(4), AS_BASE, (64, 4, "affine")),
        (quantized(4), IN_6, (64, 6, "affine")),
        # Affine groups have at least 32 entries; nvfp4's groups have 16.
        (quantized(4, 16, "nvfp4", bias=False), IN_6, (32, 6, "affine")),
        (quantized(8, 32), IN_6, (32, 8, "affine")),
        (quantized(4), PLAIN, None),
        (nn.Linear(128, 32), IN_6, None),
    ],
)
def test_layer_is_stored_as_named(module: Any, storage: Storage, expected: Any) -> None:
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
    made: Any = layer_like(module, mx.random.normal((3, 32, 128)), Storage("in 8 bits", 8))
    assert (made.bits, made.num_experts) == (8, 3)


def test_config_names_what_differs_from_the_base() -> None:
    base = {"group_size": 64, "bits": 4, "mode": "affine"}
    layers = [("q", quantized(4)), ("plain", nn.Linear(128, 32))]

    def config_for(storage: Storage) -> Any:
        config = {"quantization": dict(base), "quantization_config": dict(base), "other": 1}
        made = [
            (path, each, layer_like(each, mx.zeros((32, 128)), storage)) for path, each in layers
        ]
        add_to_config(config, made)
        assert config["quantization"] == config["quantization_config"]
        return config["quantization"]

    assert config_for(AS_BASE) == base
    assert config_for(IN_6) == base | {"q": {"group_size": 64, "bits": 6, "mode": "affine"}}
    assert config_for(PLAIN) == base | {"q": False}
