"""The kernels that `mlxtune doctor --prove` compares; a wrong kernel is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.device.default_device import has_metal, on_cpu
from mlxtune.backend.forward import operations
from mlxtune.backend.forward.head import BackboneAndHead
from mlxtune.backend.forward.kernels.gate_kernels import GateKernels
from mlxtune.core.steps.rounding import NOT_ROUNDED
from mlxtune.diagnosis import kernel_proof, proof_helper
from mlxtune.diagnosis.kernel_proof import KERNELS, kernel_checks
from tests.backend.conftest import random_examples
from tests.backend.forward.kernels.test_gate_kernels import FakeDevice
from tests.models import write_model
from tests.slow import long, slow


def failed(dtype: str = "float32") -> list[str]:
    """Return the kernels whose checks fail."""
    return [check.name for check in kernel_checks(dtype) if check.passed is False]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", long("bfloat16"), long("float16")])
def test_kernels_equal_the_cpu(dtype: str) -> None:
    assert failed(dtype) == []


def only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all kernels but one."""
    chosen = tuple(kernel for kernel in kernel_proof.KERNELS if kernel.name == name)
    assert chosen
    monkeypatch.setattr(kernel_proof, "KERNELS", chosen)


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.001), ("bfloat16", 1.05)])
def test_wrong_swiglu_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float
) -> None:
    only("SwiGLU", monkeypatch)
    monkeypatch.setattr(kernel_proof, "on_cpu", lambda: False)
    for made, names in ((1.0, []), (factor, ["SwiGLU"])):
        gates = GateKernels(FakeDevice(made).make, metal=True)
        monkeypatch.setattr(kernel_proof, "device_kernels", lambda gates=gates: gates)
        assert [name.partition(",")[0] for name in failed(dtype)] == names


def test_swiglu_kernel_that_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    only("SwiGLU", monkeypatch)
    monkeypatch.setattr(kernel_proof, "on_cpu", lambda: False)
    # There is no GPU to compile for.
    (found,) = kernel_checks("float32")
    assert (found.name, found.passed) == ("SwiGLU", False)
    assert "back-end" in found.found or "GPU" in found.found


@pytest.mark.parametrize("factor", [long(1.0), slow(1.001)])
def test_wrong_kernel_around_attention_is_found(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    only("norms and rotary embedding around attention", monkeypatch)
    monkeypatch.setattr(kernel_proof, "on_cpu", lambda: False)
    device = FakeDevice(factor)
    monkeypatch.setattr(kernel_proof, "device_language", lambda: (device.language, device.make))
    assert bool(failed()) is (factor != 1.0)


@pytest.mark.skipif(not on_cpu() and not has_metal(), reason="CUDA has no gated delta rule")
@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.001), slow("bfloat16", 1.05)])
def test_wrong_gated_delta_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float
) -> None:
    only("gated delta rule", monkeypatch)
    rule = mx.fast.gated_delta_update

    def wrong(q: mx.array, *rest: mx.array) -> Any:
        return rule(factor * q, *rest)

    monkeypatch.setattr(mx.fast, "gated_delta_update", wrong)
    (name,) = failed(dtype)
    assert name.startswith("gated delta rule")


@pytest.mark.slow
def test_card_has_no_gated_delta_rule_to_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    only("gated delta rule", monkeypatch)
    monkeypatch.setattr(kernel_proof, "on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert next(iter(kernel_checks("float32")), None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert list(kernel_checks("float32")) == []


def test_kernel_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any) -> Any:
        raise RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity")

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "gated_delta_update", raising)
    last = KERNELS[0]
    rule = next(kernel for kernel in KERNELS if kernel.name == "gated delta rule")
    monkeypatch.setattr(kernel_proof, "KERNELS", (rule, last))
    broken, fine = kernel_checks("float32")
    assert (broken.name, broken.passed) == ("gated delta rule", False)
    assert "Impacting Interactivity" in broken.found
    assert fine.passed is True


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("texts of 2 and 3 tokens", "composed_attention"),
        slow("attention with sinks", "_with_sink_key"),
        slow("attention in windows", "attention_in_blocks"),
    ],
)
def test_wrong_attention_is_found(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtune.backend.models.mixers import attention

    only(kernel, monkeypatch)
    # A device that rounds lengths up has no texts of 2 and 3 tokens.
    monkeypatch.setattr(operations, "rounding", lambda: NOT_ROUNDED)
    right = getattr(attention, name)
    # The norm after Gemma's attention would hide a factor of the output.
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


@pytest.fixture
def check_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """A function that returns the checks of a small model in 16 bits, by name."""
    model = write_model(tmp_path / "model", "qwen3", dtype="bfloat16")
    monkeypatch.setattr(proof_helper, "_examples", lambda *_: random_examples(4))
    return lambda: {check.name: check for check in proof_helper.dtype(model, tmp_path)}


def test_wrong_product_in_16_bits_is_found(
    check_16_bits: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {check.passed for check in check_16_bits().values()} == {True}
    attention = mx.fast.scaled_dot_product_attention

    def wrong(q: mx.array, *rest: Any, **options: Any) -> mx.array:
        return attention(q, *rest, **options) * (1.1 if q.dtype != mx.float32 else 1)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", wrong)
    assert False in {check.passed for check in check_16_bits().values()}


def test_refused_packing_fails(
    check_16_bits: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackboneAndHead, "try_packing", lambda self, mixers: False)
    found = check_16_bits()
    assert found["bfloat16, plain"].passed is True
    assert found["bfloat16, gpu"].passed is False
    assert "not packed" in found["bfloat16, gpu"].found
