"""The matrix products that a step needs, against formulas, and their time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from mlxtune.backend.lora.apply import apply_lora
from mlxtune.config import InstructConfig
from tests.long.floor import Matmul, matmul_seconds, step_matmuls
from tests.models import VOCAB_SIZE, write_model

# The sizes of tests/models.py.
HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, RANK = 64, 96, 4, 2, 16, 4
ATTENTION = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS)
MLP = 3 * HIDDEN * INNER
# The parameters of LoRA on q_proj and v_proj in one layer.
LORA = RANK * (HIDDEN + HEADS * WIDTH + HIDDEN + KV_HEADS * WIDTH)
LENGTHS = [10, 37, 100]
T, PAIRS = sum(LENGTHS), sum(n * (n + 1) // 2 for n in LENGTHS)
STRETCHES = [(n, 0) for n in LENGTHS]


def flops(
    folder: Path, stretches: list[tuple[int, int]] = STRETCHES, **config: Any
) -> dict[str, float]:
    model, _ = load_model(folder, lazy=True)
    apply_lora(model, InstructConfig(lora_rank=RANK, **config))
    return flops_of(model, stretches)


def flops_of(model: nn.Module, stretches: list[tuple[int, int]] = STRETCHES) -> dict[str, float]:
    counts = step_matmuls(model, stretches, 50, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN)
    found: dict[str, float] = {}
    for matmul, count in counts.items():
        found[matmul.kind] = found.get(matmul.kind, 0) + count * matmul.flops
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("products") / "m", "qwen3", num_hidden_layers=4)


def test_projections_run_forward_and_backward_but_for_the_first_attention(folder: Path) -> None:
    whole = 2 * T * (ATTENTION + MLP)
    assert flops(folder)["projections"] == pytest.approx(7 * whole + 2 * T * MLP)


def test_lora_has_six_products_and_five_in_the_first_layer(folder: Path) -> None:
    onto_inputs = 2 * T * RANK * 2 * HIDDEN
    assert flops(folder)["LoRA"] == pytest.approx(4 * 3 * 2 * T * LORA - onto_inputs)


def test_attention_is_the_causal_half_of_six_products(folder: Path) -> None:
    one = 2 * HEADS * WIDTH * PAIRS
    assert flops(folder)["attention"] == pytest.approx((4 * 2 + 3 * 4) * one)


def test_prefix_that_runs_once_is_counted_once(folder: Path) -> None:
    whole = flops(folder)
    shared = flops(folder, [(7, 0), *((n - 7, 7) for n in LENGTHS)])
    for kind in ("projections", "LoRA"):
        assert shared[kind] == pytest.approx(whole[kind] * (T - 14) / T)
    assert shared["attention"] == pytest.approx(whole["attention"] * (PAIRS - 2 * 28) / PAIRS)
    assert shared["head"] == whole["head"]


def test_sliding_window_bounds_the_pairs(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "g", "gemma3_text", sliding_window=20, vocab_size=VOCAB_SIZE)
    pairs = 10 * 11 / 2 + 37 * 38 / 2 + 100 * 20
    assert flops(folder)["attention"] == pytest.approx((3 * 2 + 2 * 4) * 2 * HEADS * WIDTH * pairs)


def test_chunks_of_a_gated_delta_rule_count_in_its_layers(tmp_path: Path) -> None:
    heads, width, chunk = 4, 16, 64
    sizes = {
        "linear_num_value_heads": heads,
        "linear_num_key_heads": 2,
        "linear_conv_kernel_dim": 4,
    }
    sizes |= {"linear_key_head_dim": width, "linear_value_head_dim": width, "head_dim": WIDTH}
    folder = write_model(
        tmp_path / "m", "qwen3_5", num_hidden_layers=4, full_attention_interval=2, **sizes
    )
    found = flops(folder)
    squares = sum(2 * 2 * n * min(n, chunk) * width for n in LENGTHS)
    states = sum(3 * 2 * (n - chunk) * width * width for n in LENGTHS if n > chunk)
    # LoRA is on the attention of layers 2 and 4. Of the two recurrences, only layer 3's, which is
    # above the first LoRA, also runs backward.
    assert found["recurrence"] == pytest.approx((1 + 3) * heads * (squares + states))
    # q_proj also returns a gate, which is in none of attention's products.
    assert found["attention"] == pytest.approx((1 + 3) * 2 * (2 * HEADS * WIDTH * PAIRS))


def test_quantized_weights_count_with_their_dequantized_size(folder: Path, tmp_path: Path) -> None:
    quantized = write_model(tmp_path / "q", "qwen3", quantize=4, num_hidden_layers=4)
    assert flops(quantized) == pytest.approx(flops(folder))


def test_experts_are_a_product_each_over_the_tokens_that_they_get(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    options = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    folder = write_model(
        tmp_path / "m", "qwen3_moe", tie_word_embeddings=True, **experts, **options
    )
    model, _ = load_model(folder, lazy=True)
    apply_lora(model, InstructConfig(lora_rank=RANK, targets=("q_proj", "down_proj")))
    counts = step_matmuls(model, STRETCHES, 50, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN)
    kinds = {matmul: n for matmul, n in counts.items() if matmul.kind == "experts"}
    assert {matmul.batch for matmul in kinds} == {4}
    # Frozen experts run forward and backward in both layers; LoRA has five products in the first
    # layer and six in the second.
    frozen, lora = 2 * T * 2 * 3 * HIDDEN * 32, 2 * T * 2 * RANK * (HIDDEN + 32)
    expected = 2 * 2 * frozen + 2 * 3 * lora - 2 * T * 2 * RANK * 32
    assert sum(n * matmul.flops for matmul, n in kinds.items()) == pytest.approx(expected)
    # With fewer tokens than experts, some experts get none.
    few = step_matmuls(model, [(1, 0)], 1, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN)
    assert {matmul.batch for matmul in few if matmul.kind == "experts"} == {2}


def test_time_is_by_kind_and_grows_with_the_count() -> None:
    one, other = Matmul("head", 32, 64, 128), Matmul("LoRA", 64, 4, 64)
    once = matmul_seconds({one: 1, other: 0.5}, "float32")
    assert matmul_seconds({one: 3, other: 0.5}, "float32") == pytest.approx(
        {"head": 3 * once["head"], "LoRA": once["LoRA"]}
    )
    assert all(0 < seconds < 1 for seconds in once.values())
