"""LoRA on experts, against mlx-lm's layer, and layers that run together."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlxtune.backend.lora.lora_layers import DropoutKeys, LoRAExperts, LoRALinear
from tests.backend.cpu.compared import assert_same_function, random
from tests.backend.limits import frees_arrays_above
from tests.backend.switched import indices
from tests.long.counts import launches

IN, OUT, EXPERTS, RANK = 24, 80, 5, 3


def layers(bits: int | None = None) -> tuple[nn.Module, nn.Module]:
    """Return our layer and mlx-lm's, with the same matrices."""
    experts = SwitchLinear(32 if bits else IN, OUT, EXPERTS, bias=True)
    experts.bias = random(EXPERTS, OUT)
    frozen = experts.to_quantized(32, bits) if bits else experts
    frozen.freeze()
    ours = LoRAExperts(frozen, rank=RANK, scale=2.0, key=mx.random.key(0))
    theirs = LoRASwitchLinear.from_base(frozen, r=RANK, scale=2.0)
    ours.lora_b = random(*ours.lora_b.shape)
    theirs.lora_a, theirs.lora_b = ours.lora_a, ours.lora_b
    return ours, theirs


def function(layer: nn.Module, chosen: mx.array, **options: Any) -> Any:
    def run(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        layer.lora_a, layer.lora_b = a, b
        return layer(x, chosen, **options)

    return run


@pytest.mark.parametrize("for_each", [1, 2], ids=["a token's experts", "each expert"])
@pytest.mark.parametrize("bits", [None, 4])
def test_unsorted_experts_match_mlx_lm(for_each: int, bits: int | None) -> None:
    ours, theirs = layers(bits)
    # Some experts get no tokens, so their gradients are zero.
    chosen = indices(7, 2, EXPERTS) // 2
    given = (random(1, 7, for_each, 1, ours.lora_a.shape[-1]), ours.lora_a, ours.lora_b)
    assert_same_function(function(ours, chosen), function(theirs, chosen), *given, tolerance=1e-5)


def test_sorted_experts_match_mlx_lm() -> None:
    ours, theirs = layers()
    chosen = mx.array([0, 0, 1, 3, 3, 3, 4], mx.uint32)
    given = (random(7, 1, IN), ours.lora_a, ours.lora_b)
    runs = (function(each, chosen, sorted_indices=True) for each in (ours, theirs))
    assert_same_function(*runs, *given, tolerance=1e-5)


def test_experts_of_rows_share_their_matrices() -> None:
    """As in DeepSeek V4's output projection: each row (N, k, 1, in) has the experts (1, k)."""
    ours, theirs = layers()
    chosen, x = mx.array([[0, 1, 2, 3, 4]], mx.uint32), random(9, EXPERTS, 1, IN)
    given = (x, ours.lora_a, ours.lora_b)
    assert_same_function(function(ours, chosen), function(theirs, chosen), *given, tolerance=1e-5)


def test_gradient_of_unsorted_experts_has_no_product_with_gathered_rows() -> None:
    ours, theirs = layers()
    chosen, x = indices(7, 2, EXPERTS), random(1, 7, 1, 1, IN)

    def matmuls(layer: nn.Module) -> int:
        def loss(layer_parameters: Any) -> mx.array:
            layer.update(layer_parameters)
            return layer(x, chosen).sum()

        made = mx.grad(loss)(layer.trainable_parameters())
        return launches([value for _, value in tree_flatten(made)])["GatherMM"]

    # No gradient reads the frozen layer's product.
    assert (matmuls(ours), matmuls(theirs)) == (0, 4)


def test_dtype_of_the_output_is_that_of_the_input() -> None:
    ours, _ = layers()
    chosen = indices(7, 2, EXPERTS)
    ours.linear.set_dtype(mx.bfloat16)
    assert ours(random(1, 7, 1, 1, IN).astype(mx.bfloat16), chosen).dtype == mx.bfloat16


def test_copies_of_matrices_are_not_kept_for_the_backward_pass() -> None:
    """Of 32 layers, at most a few hold a copy of their matrices for each pair."""
    width, count, rank = 256, 32, 16
    experts = SwitchLinear(width, width, 4, bias=False)
    experts.freeze()
    key = mx.random.key(0)
    stack = [LoRAExperts(experts, rank=rank, scale=2.0, key=key) for _ in range(count)]
    chosen = mx.arange(60, dtype=mx.uint32).reshape(1, 30, 2) % 4
    x = random(1, 30, 1, 1, width)

    def loss(trained: Any) -> mx.array:
        y = x
        for layer, matrices in zip(stack, trained, strict=True):
            layer.update(matrices)
            y = layer(y, chosen).mean(axis=2, keepdims=True)
        return y.sum()

    trained = [layer.trainable_parameters() for layer in stack]
    mx.eval(trained, experts.parameters(), x, chosen)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with frees_arrays_above(before):
        mx.eval(mx.grad(loss)(trained))
    copies = 2 * 60 * rank * width * 4
    assert mx.get_peak_memory() - before < count / 2 * copies


class Joined:
    """Layers whose outputs are made up: the projection's number for each input."""

    is_joined = True

    def __init__(self, *members: LoRALinear) -> None:
        self.members = members

    def output(self, number: int, x: mx.array) -> mx.array:
        return mx.full((*x.shape[:-1], OUT), number)


def test_shared_layer_returns_its_slice_until_it_leaves() -> None:
    options = {"key": mx.random.key(0), "dropout_keys": DropoutKeys(), "salt": 0}
    linear = nn.Linear(IN, OUT)
    layer, x = LoRALinear(linear, rank=RANK, scale=2.0, dropout=0.0, **options), random(1, 5, IN)
    joined = Joined(layer)
    layer.join(joined, 3)
    assert layer(x).tolist() == mx.full((1, 5, OUT), 3).tolist()
    joined.is_joined = False
    assert layer(x).tolist() == linear(x).tolist(), "LoRA's B is zero"
    joined.is_joined = True
    layer.leave()
    assert layer(x).tolist() == linear(x).tolist()
