"""Packed examples run side by side in layers that look across tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.head import BackboneAndHead
from mlxtune.backend.forward.operations import MLX, Operations
from mlxtune.backend.forward.packed_mixers import Mixers
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.models.packed import Layout, laid_out
from mlxtune.core.steps.execution import Execution
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
from tests.long.architectures import ARCHITECTURES
from tests.models import write_model
from tests.slow import slow

# Models with convolutions, and with recurrences beside or without attention.
HYBRIDS = ("lfm2", "falcon_h1", "mamba2")
# The first two texts share the prefix 1 2.
LINE, TEXTS = [1, 2, 3, 4, 5, 8, 9], [[1, 2, 3, 4], [1, 2, 5], [8, 9]]
LAYOUT = Layout(
    [Segment(0, 2, 0, -1), Segment(2, 4, 2, 0), Segment(4, 5, 2, 0), Segment(5, 7, 0, -1)]
)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gemma3_text", *HYBRIDS])
def test_hidden_states_of_a_sequence_equal_each_examples(architecture: str, tmp_path: Any) -> None:
    config = ARCHITECTURES[architecture] if architecture in HYBRIDS else {}
    folder = write_model(tmp_path / "m", architecture, **config)
    model = load_base(folder, "float32").model
    split = BackboneAndHead(model)
    before = [name for name, _ in model.named_modules()]
    alone = [split.hidden(mx.array([text]))[0] for text in TEXTS]
    mixers = Mixers(model, by_segments=False)
    assert [name for name, _ in model.named_modules()] == before
    with laid_out(LAYOUT):
        line = split.hidden(mx.array([LINE]), split.packed_caches())[0]
    for own, text in zip([[0, 1, 2, 3], [0, 1, 4], [5, 6]], alone, strict=True):
        assert_close(line[mx.array(own)], text, 1e-5)
    mixers.restore()
    assert_close(split.hidden(mx.array([TEXTS[0]]))[0], alone[0], 0)


@pytest.mark.parametrize("operations", [slow(MLX), CPU], ids=["mlx", "cpu"])
@pytest.mark.parametrize("prefix", [70, slow(0)])
def test_gated_delta_rule_restarts_with_each_example(
    prefix: int, operations: Operations, tmp_path: Any
) -> None:
    """Examples are longer than a chunk, with and without a shared prefix."""
    folder = write_model(tmp_path / "m", "qwen3_5", **ARCHITECTURES["qwen3_5"])
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 320, prefix).tolist()
    examples = family(1, shared, [3, 66, 5], rng, one_row=False)
    fast, alone = fresh(folder, Execution(operations), 10_000), fresh(folder)
    found = computed(fast, examples)
    assert fast.forward.execution.packs
    assert found.forward_tokens < prefix + 3 + 66 + 5
    assert_same(found, computed(alone, examples))
    for example in examples:
        assert_same(computed(fast, [example]), computed(alone, [example]))


@pytest.mark.parametrize(
    ("architecture", "operations"),
    [
        *(pytest.param(architecture, MLX, id=f"{architecture}-mlx") for architecture in HYBRIDS),
        *(pytest.param(name, CPU, id=f"{name}-cpu") for name in ("lfm2", "mamba2")),
    ],
)
def test_examples_of_a_sequence_compute_as_if_alone(
    architecture: str, operations: Operations, tmp_path: Any
) -> None:
    folder = write_model(tmp_path / "m", architecture, **ARCHITECTURES[architecture])
    rng = np.random.default_rng(0)
    # Two examples share a prefix; a third has none.
    examples = family(1, rng.integers(0, 320, 20).tolist(), [3, 5], rng, one_row=False)
    examples += family(3, [], [9], rng, one_row=False)
    fast, plain = fresh(folder, Execution(operations), 10_000), fresh(folder)
    assert fast.forward.execution.packs
    found, alone = computed(fast, examples), [computed(plain, [example]) for example in examples]
    assert found.forward_tokens == 20 + 2 + 4 + 8
    fractions = [each.tokens / found.tokens for each in alone]
    loss = sum(fraction * each.loss for fraction, each in zip(fractions, alone, strict=True))
    gradients = {
        name: sum(
            fraction * each.gradients[name] for fraction, each in zip(fractions, alone, strict=True)
        )
        for name in found.gradients
    }
    assert_same(found, replace(found, loss=loss, gradients=gradients))


@pytest.mark.parametrize("operations", [slow(MLX, id="mlx"), pytest.param(CPU, id="cpu")])
@pytest.mark.parametrize("window", [8, slow(64)])
def test_windows_shorter_than_the_examples(window: int, operations: Operations) -> None:
    folder = model_folder("gemma3_text", overrides=(("sliding_window", window),))
    fast = fresh(folder, Execution(operations), 10_000)
    assert fast.forward.execution.packs
    assert_same(computed(fast, fixed_step()), computed(fresh(folder), fixed_step()))


@pytest.mark.parametrize("operations", [MLX, CPU], ids=["mlx", "cpu"])
def test_positions_that_are_added_to_tokens_are_not_mistaken(operations: Operations) -> None:
    """GPT-2 adds positions before its layers, so its examples must be padded instead."""
    overrides = (("n_ctx", 512), ("n_embd", 64), ("n_head", 4), ("n_layer", 2))
    overrides = (*overrides, ("n_positions", 512), ("layer_norm_epsilon", 1e-5))
    folder = model_folder("gpt2", overrides=overrides)
    fast = fresh(folder, Execution(operations), 10_000)
    assert not fast.forward.execution.packs
    assert_same(computed(fast, fixed_step()), computed(fresh(folder), fixed_step()))
