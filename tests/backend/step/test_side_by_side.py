"""Examples of a line side by side, for models whose layers look across tokens in several ways."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.cpu.operations import CPU
from mlxtune.backend.model.loading import load_base
from mlxtune.backend.model.packed import Layout, laid_out
from mlxtune.backend.step.head import SplitModel
from mlxtune.backend.step.operations import MLX
from mlxtune.backend.step.side_by_side import Mixers
from mlxtune.core.steps.execution import Execution, Operations
from mlxtune.core.steps.pack import Segment
from tests.backend.cpu.compared import assert_close
from tests.backend.step.executions import (
    assert_same,
    computed,
    family,
    fixed_step,
    fresh,
    model_folder,
)
from tests.models import write_model

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
# `c d` and `x` both continue `a b`.
LINE, TEXTS = [1, 2, 3, 4, 5, 8, 9], [[1, 2, 3, 4], [1, 2, 5], [8, 9]]
LAYOUT = Layout(
    [Segment(0, 2, 0, -1), Segment(2, 4, 2, 0), Segment(4, 5, 2, 0), Segment(5, 7, 0, -1)]
)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gemma3_text"])
def test_hidden_states_of_a_line_are_those_of_each_example(architecture: str) -> None:
    model = load_base(model_folder(architecture), "float32").model
    split = SplitModel(model)
    before = [name for name, _ in model.named_modules()]
    alone = [split.hidden(mx.array([text]))[0] for text in TEXTS]
    mixers = Mixers(model, by_segments=False)
    assert [name for name, _ in model.named_modules()] == before
    with laid_out(LAYOUT):
        line = split.hidden(mx.array([LINE]), split.line_caches())[0]
    for own, text in zip([[0, 1, 2, 3], [0, 1, 4], [5, 6]], alone, strict=True):
        assert_close(line[mx.array(own)], text, 1e-5)
    mixers.restore()
    assert_close(split.hidden(mx.array([TEXTS[0]]))[0], alone[0], 0)


@pytest.mark.parametrize("operations", [MLX, CPU], ids=["mlx", "cpu"])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_convolutions_do_not_look_past_the_start_of_an_example(
    architecture: str, operations: Operations, tmp_path: Any
) -> None:
    folder = write_model(tmp_path / "m", architecture, **HYBRIDS[architecture])
    rng = np.random.default_rng(0)
    examples = family(1, rng.integers(0, 320, 20).tolist(), [3, 5], rng, one_row=False)
    fast = fresh(folder, Execution(operations), 10_000)
    found = computed(fast, examples)
    assert fast.forward.execution.packs
    assert found.run_tokens == 20 + 2 + 4
    assert_same(found, computed(fresh(folder), examples))


@pytest.mark.parametrize("operations", [MLX, CPU], ids=["mlx", "cpu"])
@pytest.mark.parametrize("window", [8, 64])
def test_windows_shorter_than_the_examples(window: int, operations: Operations) -> None:
    folder = model_folder("gemma3_text", overrides=(("sliding_window", window),))
    fast = fresh(folder, Execution(operations), 10_000)
    assert fast.forward.execution.packs
    assert_same(computed(fast, fixed_step()), computed(fresh(folder), fixed_step()))


@pytest.mark.parametrize("operations", [MLX, CPU], ids=["mlx", "cpu"])
def test_positions_that_are_added_to_tokens_are_not_mistaken(operations: Operations) -> None:
    """GPT-2 adds them before its layers: it is padded instead."""
    overrides = (("n_ctx", 512), ("n_embd", 64), ("n_head", 4), ("n_layer", 2))
    overrides = (*overrides, ("n_positions", 512), ("layer_norm_epsilon", 1e-5))
    folder = model_folder("gpt2", overrides=overrides)
    fast = fresh(folder, Execution(operations), 10_000)
    assert not fast.forward.execution.packs
    assert_same(computed(fast, fixed_step()), computed(fresh(folder), fixed_step()))
