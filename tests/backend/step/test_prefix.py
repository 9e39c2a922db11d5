"""A prefix that is run once, as keys and values of each layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from mlxtune.backend.cpu.operations import CPU
from mlxtune.backend.model.loading import load_base
from mlxtune.backend.step.head import SplitModel
from mlxtune.backend.step.operations import MLX
from mlxtune.backend.step.prefix import PrefixCache
from mlxtune.core.steps.execution import Execution, Operations
from tests.backend.cpu.compared import assert_close, random
from tests.backend.step.executions import (
    EAGER,
    assert_same,
    computed,
    family,
    fresh,
    model_folder,
    pipeline,
)


def recorded(length: int) -> list[mx.array]:
    return [random(1, 2, length, 4, seed=1), random(1, 2, length, 6, seed=2)]


@pytest.mark.parametrize("lines", [1, 3])
def test_keys_and_values_of_the_prefix_come_first(lines: int) -> None:
    keys, values = random(lines, 2, 5, 4, seed=3), random(lines, 2, 5, 6, seed=4)
    before = recorded(7)
    all_keys, all_values = PrefixCache(before).update_and_fetch(keys, values)
    for whole, prefix, own in ((all_keys, before[0], keys), (all_values, before[1], values)):
        assert whole.shape[:3] == (lines, 2, 12)
        for line in range(lines):
            assert mx.array_equal(whole[line, :, :7], prefix[0])
            assert mx.array_equal(whole[line, :, 7:], own[line])


def test_prefix_is_recorded_as_it_is() -> None:
    cache, given = PrefixCache(), recorded(7)
    assert cache.offset == 0
    found = cache.update_and_fetch(*given)
    assert all(mx.array_equal(x, y) for x, y in zip(found, given, strict=True))
    assert PrefixCache(cache.recorded).offset == 7


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("window", [None, 4, 100])
def test_mask_is_the_one_mlx_lm_makes_for_a_cache_so_long(
    as_array: bool, window: int | None
) -> None:
    prefix, length = 7, 5
    cache = KVCache()
    cache.update_and_fetch(*(mx.zeros((1, 2, prefix, 4)) for _ in range(2)))
    hidden = mx.zeros((1, length, 8))
    expected = create_attention_mask(hidden, cache, window, True)
    found = create_attention_mask(hidden, PrefixCache(recorded(prefix)), window, as_array)
    if isinstance(found, str):
        assert not as_array
        # Queries are aligned to the end of the keys.
        found = mx.arange(prefix, prefix + length)[:, None] >= mx.arange(prefix + length)
    assert mx.array_equal(found, expected)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("prefix", [1, 7, 8, 9, 20])
def test_rest_behind_a_prefix_gives_what_the_whole_gives(architecture: str, prefix: int) -> None:
    split = SplitModel(load_base(model_folder(architecture), "float32").model)
    tokens = mx.array(np.random.default_rng(0).integers(0, 320, (3, prefix + 6)))
    tokens[:, :prefix] = tokens[0, :prefix]
    whole = split.hidden(tokens)
    recorders = [PrefixCache() for _ in split.model.layers]
    first = split.hidden(tokens[:1, :prefix], recorders)
    rest = split.hidden(tokens[:, prefix:], [PrefixCache(r.recorded) for r in recorders])
    assert_close(first, whole[:1, :prefix], 1e-5)
    assert_close(rest, whole[:, prefix:], 1e-5)


HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
}


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_architecture_with_other_caches_runs_each_example_whole(
    architecture: str, tmp_path: Any
) -> None:
    from tests.models import write_model

    folder = write_model(tmp_path / "m", architecture, **HYBRIDS[architecture])
    rng = np.random.default_rng(0)
    examples = family(1, rng.integers(0, 320, 20).tolist(), [3, 5], rng, one_row=False)
    fast = fresh(folder, Execution(MLX), 10_000)
    assert fast.forward.execution.split_head
    found = computed(fast, examples)
    assert not fast.forward.shares_prefixes
    assert found.run_tokens == 22 + 24
    assert_same(found, computed(fresh(folder), examples))


@pytest.mark.parametrize("operations", [MLX, CPU], ids=["mlx", "cpu"])
@pytest.mark.parametrize("rests", [[1, 1, 1], [1], [1, 8]], ids=str)
def test_single_tokens_after_a_prefix(rests: list[int], operations: Operations) -> None:
    rng = np.random.default_rng(1)
    examples = family(1, rng.integers(0, 320, 15).tolist(), rests, rng, one_row=False)
    fast = pipeline("gemma3_text", Execution(operations), tokens=10_000, cost=EAGER)
    assert_same(computed(fast, examples), computed(pipeline("gemma3_text"), examples))
