"""The kernels that `mlxtune doctor --prove` compares, and that a wrong one is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.forward.gate_kernels import GateKernels
from mlxtune.backend.forward.head import SplitModel
from mlxtune.diagnosis import kernel_proofs
from mlxtune.diagnosis import proofs as proving
from mlxtune.diagnosis.kernel_proofs import KERNELS, kernel_differences
from mlxtune.diagnosis.proving import check_dtype, check_gradients
from tests.backend.conftest import random_examples
from tests.backend.forward.test_gate_kernels import FakeDevice
from tests.models import write_model
from tests.slow import slow


def failed(dtype: str = "float32") -> list[str]:
    """Return the kernels whose checks fail."""
    names = []
    for found in kernel_differences(dtype):
        if "error" in found:
            names.append(found["way"])
        elif dtype == "float32":
            check = check_gradients("", found["way"], found["loss"], found["gradient"])
            names += [check.name] if check.passed is False else []
        else:
            check = check_dtype("", found["way"], found["cosine"], found["norm"])
            names += [check.name] if check.passed is False else []
    return names


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16"), slow("float16")])
def test_kernels_equal_the_cpu(dtype: str) -> None:
    assert failed(dtype) == []


def only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out all kernels but one."""
    chosen = tuple(each for each in kernel_proofs.KERNELS if each.name == name)
    assert chosen
    monkeypatch.setattr(kernel_proofs, "KERNELS", chosen)


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.001), ("bfloat16", 1.05)])
def test_wrong_swiglu_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float
) -> None:
    only("SwiGLU", monkeypatch)
    monkeypatch.setattr(kernel_proofs, "on_cpu", lambda: False)
    for made, names in ((1.0, []), (factor, ["SwiGLU"])):
        kernels = GateKernels(FakeDevice(made).make, metal=True)
        monkeypatch.setattr(kernel_proofs, "device_kernels", lambda kernels=kernels: kernels)
        assert [name.partition(",")[0] for name in failed(dtype)] == names


def test_swiglu_kernel_that_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    only("SwiGLU", monkeypatch)
    monkeypatch.setattr(kernel_proofs, "on_cpu", lambda: False)
    # There is no GPU to compile for.
    (found,) = kernel_differences("float32")
    assert found["way"] == "SwiGLU"
    assert "back-end" in found["error"] or "GPU" in found["error"]


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.001), ("bfloat16", 1.05)])
def test_wrong_gated_delta_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float
) -> None:
    only("gated delta rule", monkeypatch)
    assert failed(dtype) == []
    rule = kernel_proofs.gated_delta.kernel_rule

    def wrong(q: mx.array, *rest: mx.array) -> Any:
        return rule(factor * q, *rest)

    monkeypatch.setattr(kernel_proofs.gated_delta, "kernel_rule", wrong)
    (name,) = failed(dtype)
    assert name.startswith("gated delta rule")


def test_card_has_no_gated_delta_rule_to_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    only("gated delta rule", monkeypatch)
    monkeypatch.setattr(kernel_proofs, "on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert list(kernel_differences("float32"))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert list(kernel_differences("float32")) == []


def test_kernel_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any) -> Any:
        raise RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity")

    monkeypatch.setattr(kernel_proofs.gated_delta, "kernel_rule", raising)
    last = KERNELS[0]
    rule = next(each for each in KERNELS if each.name == "gated delta rule")
    monkeypatch.setattr(kernel_proofs, "KERNELS", (rule, last))
    broken, fine = kernel_differences("float32")
    assert broken["way"] == "gated delta rule"
    assert "Impacting Interactivity" in broken["error"]
    assert fine["gradient"] <= 1e-4


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("texts of 2 and 3 tokens", "composed_attention"),
        ("attention with sinks", "_with_sink_key"),
        ("attention in windows", "attention_in_blocks"),
    ],
)
def test_wrong_attention_is_found(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtune.backend.models.mixers import attention

    only(kernel, monkeypatch)
    right = getattr(attention, name)
    # A factor of the output would not outlast Gemma's norm behind it.
    monkeypatch.setattr(attention, name, lambda q, *rest: right(1.01 * q, *rest))
    assert failed() == [kernel]


def test_sink_of_the_wrong_sign_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtune.backend.models.mixers import attention

    only("attention with sinks", monkeypatch)
    right = attention._with_sink_key

    def wrong(q: Any, k: Any, v: Any, scale: float, sinks: Any, size: int) -> Any:
        return right(q, k, v, scale, -sinks, size)

    monkeypatch.setattr(attention, "_with_sink_key", wrong)
    assert failed() == ["attention with sinks"]


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


def test_refused_packing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "qwen3", dtype="bfloat16")
    examples = random_examples(4)
    proving.write_reference(model, examples, tmp_path / "reference.npz")
    monkeypatch.setattr(SplitModel, "packs", lambda self, mixers: False)
    found = list(proving.dtype_differences(model, examples, tmp_path / "reference.npz"))
    checks = {each[0]: check_dtype("model", *each) for each in found}
    assert checks["bfloat16, plain"].passed is True
    assert checks["bfloat16, gpu"].passed is False
    assert "not packed" in checks["bfloat16, gpu"].found
