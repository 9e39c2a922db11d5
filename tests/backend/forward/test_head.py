"""Splitting a model into backbone and head, and the head's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward import head
from mlxtune.backend.forward.forward import Forward
from mlxtune.backend.forward.head import BackboneAndHead
from mlxtune.backend.forward.loss import trained_head
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.forward.packed_mixers import Mixers
from mlxtune.backend.lora.lora_layers import DropoutKeys
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.models.stored_layers import DEQUANTIZED, QuantizedHead
from mlxtune.config.data_config import BaseOptions
from mlxtune.core.steps.execution import Execution
from tests.backend.cpu.compared import assert_close, assert_same_function, random
from tests.backend.step.executions import (
    assert_same,
    computed,
    fixed_step,
    fresh,
    model_folder,
    pipeline,
    plain_step,
)

TOKENS = mx.array([[5, 9, 200, 33], [1, 2, 3, 4]])


def model_of(
    architecture: str, quantize: int | None = None, overrides: tuple[tuple[str, Any], ...] = ()
) -> nn.Module:
    return load_base(model_folder(architecture, quantize, "float32", overrides), "float32").model


@pytest.mark.parametrize("quantize", [None, 4])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "gemma3_text"])
def test_head_after_backbone_is_the_model(architecture: str, quantize: int | None) -> None:
    model = model_of(architecture, quantize)
    names = [name for name, _ in tree_flatten(model.parameters())]
    split = BackboneAndHead(model)
    assert split.is_separable
    hidden = split.hidden(TOKENS)
    assert hidden.shape == (2, 4, 64)
    logits = split.logits(hidden.reshape(8, 64)[mx.array([6, 1])])
    assert_close(logits, model(TOKENS).reshape(8, -1)[mx.array([6, 1])], 1e-6)
    assert [name for name, _ in tree_flatten(model.parameters())] == names


@pytest.mark.parametrize(
    "architecture, overrides, plain_matmul",
    [
        ("qwen3", (), True),
        ("qwen3", (("tie_word_embeddings", False),), True),
        ("llama", (), True),
        ("gemma3_text", (), True),
        ("gemma2", (), False),  # soft-caps its logits
        ("cohere", (("logit_scale", 0.0625), ("layer_norm_bias", False)), False),
        ("phi", (("layer_norm_eps", 1e-5), ("partial_rotary_factor", 0.5)), False),  # has a bias
    ],
)
def test_single_matmul_head_is_detected(
    architecture: str, overrides: tuple[tuple[str, Any], ...], plain_matmul: bool
) -> None:
    model = model_of(architecture, None, overrides)
    split = BackboneAndHead(model)
    assert split.is_separable
    assert (split.weight is not None) == plain_matmul
    if split.weight is not None:
        hidden = split.hidden(TOKENS)
        assert_close(hidden @ split.weight.T, model(TOKENS), 1e-5)


def test_quantized_head_is_not_a_plain_product() -> None:
    folder = model_folder("llama", 4)
    native = load_base(folder, "float32", BaseOptions(quantized_compute="quantized")).model
    assert BackboneAndHead(native).weight is None


def test_dequantized_head_is_one_product_whose_rows_are_unpacked() -> None:
    for architecture in ("llama", "qwen3"):  # a separate head, and a tied one
        folder = model_folder(architecture, 4)
        model = load_base(folder, "float32", BaseOptions(quantized_compute=DEQUANTIZED)).model
        split = BackboneAndHead(model)
        assert isinstance(split.weight, QuantizedHead)
        assert_close(split.hidden(TOKENS) @ split.weight[:].T, model(TOKENS), 1e-5)


def test_soft_cap_that_small_logits_hide_is_seen() -> None:
    """These weights' logits are too small for soft-capping to show in a comparison."""
    model = model_of("gemma2")
    model.final_logit_softcapping = 3000.0
    assert BackboneAndHead(model).weight is None


class Renamed(nn.Module):  # type: ignore[misc]
    """A model whose backbone has a different name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.backbone = inner.model

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        hidden = self.backbone(inputs, cache)
        logits: mx.array = self.backbone.embed_tokens.as_linear(hidden)
        return logits

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.backbone.layers)


def test_backbone_is_found_by_its_layers() -> None:
    model = Renamed(model_of("qwen3"))
    split = BackboneAndHead(model)
    assert split.is_separable
    assert split.weight is not None
    assert_close(split.logits(split.hidden(TOKENS)[0]), model(TOKENS)[0], 1e-6)


class Wrapped(nn.Module):  # type: ignore[misc]
    """A model whose backbone returns more than hidden states."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = _Pair(inner.model)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        hidden, _ = self.model(inputs, cache)
        logits: mx.array = self.model.inner.embed_tokens.as_linear(hidden)
        return logits

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.model.inner.layers)


class _Pair(nn.Module):  # type: ignore[misc]
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, inputs: mx.array, cache: Any = None) -> tuple[mx.array, None]:
        return self.inner(inputs, cache), None


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("how", [Execution(MLX), Execution(CPU)], ids=["mlx", "cpu"])
def test_unknown_backbone_splits_after_last_norm_or_runs_whole(
    how: Execution, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not norm:
        monkeypatch.setattr(head, "_stack", lambda backbone: None)

    class Loaded:
        def __init__(self, folder: Path, dtype: str, _: Any) -> None:
            self.model = Wrapped(load_base(folder, dtype).model)

    monkeypatch.setattr("tests.backend.step.executions.load_base", Loaded)
    odd = fresh(model_folder("qwen3"), how, 10_000)
    assert odd.forward.execution.separate_head is norm
    assert norm or not odd.forward.execution.packs
    assert_same(computed(odd, fixed_step()), computed(fresh(model_folder("qwen3")), fixed_step()))


def test_head_runs_only_on_supervised_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = pipeline("gemma2", Execution(MLX, loss_chunk=5), tokens=10_000)
    counts: list[int] = []
    plain = BackboneAndHead.logits

    def counted(self: BackboneAndHead, hidden: mx.array) -> mx.array:
        counts.append(len(hidden))
        return plain(self, hidden)

    monkeypatch.setattr(BackboneAndHead, "logits", counted)
    found = computed(fast, fixed_step())
    assert sum(counts) == found.tokens
    assert max(counts) == 5
    assert_same(found, plain_step("gemma2"))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_loss_by_chunks_is_the_loss(chunk: int) -> None:
    weight, labels = random(50, 8), mx.array([3, 0, 49, 3, 7, 12, 1])

    def whole(hidden: mx.array) -> mx.array:
        losses: mx.array = nn.losses.cross_entropy(mx.tanh(hidden @ weight.T), labels)
        return losses.sum()

    def in_chunks(hidden: mx.array) -> mx.array:
        def logits(rows: mx.array) -> mx.array:
            assert len(rows) <= chunk
            return mx.tanh(rows @ weight.T)

        return trained_head(logits, labels, chunk, mx.fast.cross_entropy)(hidden)[0].sum()

    assert_same_function(in_chunks, whole, random(7, 8))


def test_gradient_of_the_loss_scales_with_its_cotangent() -> None:
    weight, labels, hidden = random(50, 8), mx.array([3, 0]), random(2, 8)

    def loss(hidden: mx.array, factor: float) -> mx.array:
        head = trained_head(lambda x: x @ weight.T, labels, 1, mx.fast.cross_entropy)
        return head(hidden)[0].sum() * factor

    one, half = (mx.grad(lambda x, f=f: loss(x, f))(hidden) for f in (1.0, 0.5))
    assert np.abs(np.array(one)).max() > 0.1
    assert_close(half, one * 0.5, 1e-6)


def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make attention with few queries differ by rounding, as in Metal's vector kernel."""
    real = mx.fast.scaled_dot_product_attention

    def either(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        output = real(q, k, v, **options)
        few = q.shape[2] * (q.shape[1] // k.shape[1]) <= 32
        return output * mx.array(1 + 2**-7, output.dtype) if few else output

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", either)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_model_packs_with_any_kernels_for_short_texts(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = (("num_attention_heads", 14), ("num_key_value_heads", 2), ("head_dim", 8))
    folder = model_folder("qwen2", None, dtype, heads)
    two_kernels(monkeypatch)
    model = load_base(folder, dtype).model
    forward = Forward(model, DropoutKeys(), Execution(MLX), trains=False)
    assert forward.execution.packs
    assert forward.packing_problem == ""


def test_refused_packing_has_a_reason() -> None:
    class Positions(nn.Module):  # type: ignore[misc]
        """Adds positions in the packed sequence to embeddings, as GPT-2 does."""

        def __init__(self, embed: nn.Module) -> None:
            super().__init__()
            self.embed = embed

        def __call__(self, tokens: mx.array) -> mx.array:
            positions = mx.arange(tokens.shape[1], dtype=mx.float32)[:, None]
            return self.embed(tokens) + 0.1 * mx.sin(positions)

        def as_linear(self, x: mx.array) -> mx.array:
            return self.embed.as_linear(x)

    model = model_of("qwen3")
    model.model.embed_tokens = Positions(model.model.embed_tokens)
    forward = Forward(model, DropoutKeys(), Execution(MLX), trains=False)
    assert not forward.execution.packs
    assert "hidden states differ by" in forward.packing_problem


@pytest.mark.parametrize("only_segments", [True, False])
def test_packing_that_fails_by_segments_is_tried_without(
    only_segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("qwen3")
    parts, mixers = BackboneAndHead(model), Mixers(model, by_segments=True)
    hidden = parts.hidden

    def failing(*given: Any) -> mx.array:
        if mixers.by_segments or not only_segments:
            raise ValueError("cannot pack")
        return hidden(*given)

    monkeypatch.setattr(parts, "hidden", failing)
    assert parts.try_packing(mixers) == only_segments
    assert not mixers.by_segments
    assert ("cannot pack" in parts.packing_problem) != only_segments
