"""The kernels that `mlxtune doctor --prove` compares, and that a wrong one is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.measure import kernel_proofs, proving
from mlxtune.backend.measure.kernel_proofs import kernel_differences
from mlxtune.core.machine.proving import check_dtype, check_gradients
from tests.backend.conftest import random_examples
from tests.models import write_model


def failed() -> list[str]:
    """Return the kernels whose checks fail."""
    checks = [check_gradients("kernels", *each) for each in kernel_differences()]
    return [check.name for check in checks if not check.passed]


def test_kernels_equal_the_cpu() -> None:
    assert failed() == []


def test_wrong_gated_delta_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = kernel_proofs.gated_delta.kernel_rule

    def wrong(q: mx.array, *rest: mx.array) -> Any:
        return rule(1.001 * q, *rest)

    monkeypatch.setattr(kernel_proofs.gated_delta, "kernel_rule", wrong)
    assert failed() == ["kernels: gated delta rule"]


@pytest.mark.parametrize("name", ["composed_attention", "_with_sink_key", "attention_in_blocks"])
def test_wrong_attention_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtune.backend.mixers import attention

    right = getattr(attention, name)
    # A factor of the output would not outlast Gemma's norm behind it.
    monkeypatch.setattr(attention, name, lambda q, *rest: right(1.01 * q, *rest))
    assert failed() != []


def test_wrong_product_in_16_bits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "qwen3", dtype="bfloat16")
    examples = random_examples(4)
    proving.write_reference(model, examples, tmp_path / "reference.npz")

    def passed() -> set[bool | None]:
        found = proving.dtype_differences(model, examples, tmp_path / "reference.npz")
        return {check_dtype("model", *each).passed for each in found}

    assert passed() == {True}
    attention = mx.fast.scaled_dot_product_attention

    def wrong(q: mx.array, *rest: Any, **options: Any) -> mx.array:
        return attention(q, *rest, **options) * (1.1 if q.dtype != mx.float32 else 1)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", wrong)
    assert False in passed()
