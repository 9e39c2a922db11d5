"""A trial decides whether packing is exact for a model, and tells rounding from errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune.backend.forward import head, packed_mixers, packing_trial
from mlxtune.backend.forward.forward import Forward
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.forward.packing_trial import _LONG_TEXTS, _SHORT_TEXTS, Texts
from mlxtune.backend.lora.lora_layers import DropoutKeys
from mlxtune.backend.models import packed
from mlxtune.backend.models.loading import load_base
from mlxtune.core.steps.execution import Execution
from tests.backend.step.executions import model_folder
from tests.slow import long, slow

# The relative step between adjacent numbers of each dtype.
LAST_BIT = {"bfloat16": 2**-7, "float16": 2**-10}


def packing_problem(model: nn.Module) -> str:
    """Return the reason why a model cannot pack, or an empty text if it can."""
    forward = Forward(model, DropoutKeys(), Execution(MLX), trains=False)
    assert forward.execution.packs == (not forward.packing_problem)
    return forward.packing_problem


def deep(depth: int, dtype: str, architecture: str = "qwen2") -> nn.Module:
    shape = {"num_hidden_layers": depth, "num_attention_heads": 14, "head_dim": 8}
    return load_base(model_folder(architecture, None, dtype, tuple(shape.items())), dtype).model


@pytest.fixture(params=[_SHORT_TEXTS, _LONG_TEXTS], ids=["short", "long"])
def texts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Texts]:
    """The trial's texts: short ones, as on the CPU, or long ones, as on a GPU."""
    monkeypatch.setattr(head, "trial_texts", lambda: request.param)
    yield request.param


Attention = Callable[..., mx.array]


def replace_attention(
    monkeypatch: pytest.MonkeyPatch, changed: Callable[[mx.array, mx.array], mx.array]
) -> None:
    """Make attention return `changed(output, queries)`."""
    real = mx.fast.scaled_dot_product_attention

    def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        return changed(real(q, k, v, **options), q)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)


@pytest.mark.parametrize("depth", [24, long(64)])
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_deep_model_packs_though_the_last_bit_of_attention_is_random(
    dtype: str, depth: int, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def rounded_otherwise(output: mx.array, q: mx.array) -> mx.array:
        bits = mx.array(rng.integers(-1, 2, output.shape).astype(np.float32))
        return (output.astype(mx.float32) * (1 + LAST_BIT[dtype] * bits)).astype(output.dtype)

    replace_attention(monkeypatch, rounded_otherwise)
    assert packing_problem(deep(depth, dtype)) == ""


class Positions(nn.Module):  # type: ignore[misc]
    """Adds positions in the packed sequence to embeddings, scaled to a fraction of their size."""

    def __init__(self, embed: nn.Module, fraction: float) -> None:
        super().__init__()
        self.embed, self.fraction = embed, fraction

    def __call__(self, tokens: mx.array) -> mx.array:
        embedded = self.embed(tokens)
        size = mx.sqrt(2 * embedded.astype(mx.float32).square().mean())
        frequencies = mx.exp(mx.linspace(0, -4, embedded.shape[-1]))
        angles = mx.arange(tokens.shape[1])[:, None] * frequencies
        return embedded + (self.fraction * size * mx.sin(angles)).astype(embedded.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.embed.as_linear(x)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), "float32"])
def test_positions_at_two_percent_of_the_embeddings_are_seen(dtype: str, texts: Texts) -> None:
    model = deep(4, dtype)
    assert packing_problem(model) == ""
    model.model.embed_tokens = Positions(model.model.embed_tokens, 0.02)
    assert "before layer 0, but rounding explains" in packing_problem(model)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), "float32"])
@pytest.mark.parametrize("error", ["leak", "position", "order"])
def test_errors_of_attention_are_seen(
    error: str, dtype: str, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep(4, dtype)
    assert packing_problem(model) == ""
    beside = packed.Layout.padded_indices.func  # type: ignore[attr-defined]

    def wrong(layout: packed.Layout) -> mx.array:
        """Return the examples side by side, with an error in the last one."""
        rows = np.array(beside(layout))
        if error == "leak":  # the last text starts with the previous text's last token
            rows[-1, 0] = rows[-2, -1]
        elif error == "position":  # a token is at the wrong position
            rows[-1, 1:] = rows[-1, :-1].copy()
        else:
            rows[-1, :2] = rows[-1, 1::-1].copy()
        return mx.array(rows)

    monkeypatch.setattr(packed.Layout, "padded_indices", property(wrong))
    assert "hidden states differ" in packing_problem(model)


def test_an_error_of_one_layer_is_seen_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = deep(24, "bfloat16"), []
    run = packed_mixers.Mixers._run

    def fifth(self: Any, mixer: nn.Module, *args: Any, **options: Any) -> Any:
        output = run(self, mixer, *args, **options)
        if packed.layout() is None:
            return output
        calls.append(mixer)
        return output * (1.2 if len(calls) % 24 == 5 else 1)

    monkeypatch.setattr(packed_mixers.Mixers, "_run", fifth)
    assert "before layer 5, but" in packing_problem(model)


def test_texts_share_the_tokens_that_their_sequence_shares() -> None:
    for each in (_SHORT_TEXTS, _LONG_TEXTS):
        one, other, third = each.tokens
        assert one[: each.prefix] == other[: each.prefix]
        assert one[each.prefix] != other[each.prefix]
        assert third[0] not in (one[0], other[0])
        assert each.packed == [*one, *other[each.prefix :], *third]
        positions = [*range(each.length), *range(each.prefix, each.length), *range(each.length)]
        assert each.layout().positions.tolist() == positions
        rows = np.array(each.layout().padded_indices)[:, : each.length]
        assert np.array(each.packed)[rows].tolist() == each.tokens


def test_only_a_gpu_tries_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_trial, "on_cpu", lambda: True)
    short = packing_trial.trial_texts()
    assert sum(map(len, short.tokens)) + len(short.packed) == 22
    monkeypatch.setattr(packing_trial, "on_cpu", lambda: False)
    long = packing_trial.trial_texts()
    assert long.length > 32
    assert len(long.packed) > 32
