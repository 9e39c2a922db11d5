"""The options for LoRA's rank, scale and initial values."""

from __future__ import annotations

import ast
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.config.lora_config import (
    LoraConfig,
    alpha_of,
    init_problem,
    pattern_of,
    pissa_iterations,
    scale_of,
    target_ranks,
)
from mlxtune.errors import ConfigError
from tests.sources import PACKAGE, nodes_of


def test_ranks_keep_their_order() -> None:
    found = target_ranks(["q_proj=16", " mlp.up_proj = 4 "])
    assert list(found.items()) == [("q_proj", 16), ("mlp.up_proj", 4)]


def test_every_wrong_rank_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        target_ranks(
            ["q_proj", "=3", "v_proj=0", "k_proj=x", "o_proj=²", "a=1", "a=2", "b=9999999"]
        )
    assert len(caught.value.problems) == 7
    assert "--target-rank 'b=9999999': the rank must be at most 999999" in caught.value.problems
    assert "--target-rank 'v_proj=0' must be like q_proj=16" in caught.value.problems
    assert "--target-rank names a twice" in caught.value.problems


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.3.self_attn.q_proj", "q_proj"),
        ("model.layers.13.mlp.up_proj", "mlp.up_proj"),
        ("model.layers.3.mlp.down_proj", "3.mlp.down_proj"),
        ("model.layers.13.mlp.down_proj", "down_proj"),
        ("model.layers.3.self_attn.eq_proj", None),
    ],
)
def test_first_pattern_that_ends_a_name_counts(name: str, pattern: str | None) -> None:
    ranks = {"q_proj": 1, "mlp.up_proj": 2, "3.mlp.down_proj": 3, "down_proj": 4, "up_proj": 5}
    assert pattern_of(name, ranks) == pattern


def test_scale_is_alpha_by_rank_or_by_its_root() -> None:
    assert scale_of(16, 8, rslora=False) == 2
    assert scale_of(16, 64, rslora=True) == 2


@given(st.floats(1e-3, 1e3), st.integers(1, 512), st.booleans())
def test_alpha_gives_its_scale_back(scale: float, rank: int, rslora: bool) -> None:
    alpha = alpha_of(scale, rank, rslora=rslora)
    assert math.isclose(scale_of(alpha, rank, rslora=rslora), scale, rel_tol=1e-15)


def test_beginnings() -> None:
    assert [init_problem(each) for each in ("lora", "pissa", "pissa_niter_16")] == [None] * 3
    assert (pissa_iterations("pissa_niter_16"), pissa_iterations("pissa")) == (16, None)
    for wrong in ("", "dora", "pissa_niter_0", "pissa_niter_", "pissa_niter_1000", "xpissa"):
        assert "must be lora, pissa or pissa_niter_N" in str(init_problem(wrong))


def test_only_one_property_tells_pissa_from_other_initial_values() -> None:
    found = {init: LoraConfig(init=init).is_pissa for init in ("lora", "pissa", "pissa_niter_4")}
    assert found == {"lora": False, "pissa": True, "pissa_niter_4": True}
    # A comparison elsewhere, such as with "lora", would make every further initialisation PiSSA.
    compared = [
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Compare)
        for each in (node.left, *node.comparators)
        if isinstance(each, ast.Attribute) and each.attr == "init"
    ]
    assert compared == ["lora_config.py"]
