"""Products with quantised matrices: the same numbers in every form, and their times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.models import loading, stored_layers
from mlxtune.backend.models.loading import load_base, open_base, slow_matmuls, with_matmul_form
from mlxtune.backend.models.quantize import FORMATS
from mlxtune.backend.models.stored_layers import (
    DequantizedLinear,
    QuantizedHead,
    StoredExperts,
    StoredLinear,
    TimedMatmuls,
    frozen_matmul,
    time_matmuls,
)
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.config.data_config import BaseOptions
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from tests.backend.conftest import fill_lora_b
from tests.backend.limits import frees_arrays_above
from tests.backend.step.executions import PLAIN, model_folder
from tests.experts import EXPERTS
from tests.models import write_model
from tests.slow import slow

WAYS = {
    "plain": PLAIN,
    "recompute": Execution(MLX, recompute=True),
    "cpu kernels": Execution(CPU),
}


def examples() -> list[Example]:
    rng = np.random.default_rng(3)
    mask = np.array([0] * 5 + [1] * 8, dtype=np.uint8)
    return [Example(i, rng.integers(0, 300, 13).astype("i4"), mask) for i in range(3)]


def on_plain_weights(model: nn.Module) -> None:
    """Replace each quantised layer with a plain layer of the dequantised weights in float32."""
    made = []
    for name, module in model.named_modules():
        if not hasattr(module, "unpacked"):
            continue
        weight = module.unpacked(mx.float32)
        embeds = isinstance(module, nn.QuantizedEmbedding)
        plain = (nn.Embedding if embeds else nn.Linear)(*(weight.shape if embeds else (1, 1)))
        if not embeds:
            plain.pop("bias")
        plain.weight = weight
        made.append((name, plain))
    model.update_modules(tree_unflatten(made))


def step(model: nn.Module, how: Execution) -> tuple[float, dict[str, np.ndarray]]:
    config = InstructConfig(lora_rank=4, lora_alpha=8.0, targets=("all",))
    pipeline = InstructPipeline(model, config, execution=replace(how, micro_batch_tokens=100))
    fill_lora_b(pipeline)
    result = pipeline.loss_and_gradients(examples(), 1)
    loss, gradients = result.loss, result.gradients
    return loss, {name: np.array(value) for name, value in tree_flatten(gradients)}


def close(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    largest = max(np.abs(value).max() for value in other.values())
    differences = [np.abs(one[name] - value).max() for name, value in other.items()]
    return bool(max(differences) <= 1e-4 * largest)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(slow("llama", "mxfp4"), slow("qwen3", "4"), ("gemma3_text", "nf4")),
        *(slow("llama", name) for name in FORMATS if name != "mxfp4"),
    ],
)
def test_lora_on_quantized_weights_equals_lora_on_dequantized(architecture: str, name: str) -> None:
    folder = model_folder(architecture)

    def loaded(compute: str = "dequantized") -> nn.Module:
        options = {"quantize": name, "quantized_compute": compute}
        return load_base(folder, "float32", BaseOptions(**options)).model  # type: ignore[arg-type]

    plain = loaded()
    on_plain_weights(plain)
    loss, gradients = step(plain, PLAIN)
    runs = {way: (loaded(), how) for way, how in WAYS.items()}
    if name != "nf4":
        runs["native"] = (loaded("quantized"), PLAIN)
        runs["native, cpu kernels"] = (loaded("quantized"), WAYS["cpu kernels"])
    for way, (model, how) in runs.items():
        found, theirs = step(model, how)
        assert found == pytest.approx(loss, rel=1e-5), way
        assert close(theirs, gradients), way


@pytest.mark.parametrize("compute", ["quantized", "dequantized"])
def test_embeddings_are_given_in_the_compute_dtype(tmp_path: Path, compute: str) -> None:
    folder = write_model(tmp_path / "model", "llama")
    for dtype in ("float32", "float16"):
        base = load_base(folder, dtype, BaseOptions(quantize="mxfp4", quantized_compute=compute))
        assert base.model(mx.array([[1, 2]])).dtype == getattr(mx, dtype)
        assert base.quantized_compute == compute


def test_auto_is_dequantized_on_the_cpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", "llama")
    monkeypatch.setattr(stored_layers, "on_cpu", lambda: True)
    assert load_base(folder, "auto", BaseOptions(quantize="4")).quantized_compute == "dequantized"
    assert load_base(folder, "auto").quantized_compute is None
    monkeypatch.setattr(stored_layers, "on_cpu", lambda: False)
    assert load_base(folder, "auto", BaseOptions(quantize="4")).quantized_compute == "quantized"
    # MLX has no product for nf4.
    assert load_base(folder, "auto", BaseOptions(quantize="nf4")).quantized_compute == "dequantized"


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models as on the CPU, whatever the device."""
    for module in (stored_layers, loading):
        monkeypatch.setattr(module, "on_cpu", lambda: True)


@pytest.mark.usefixtures("on_the_cpu")
def test_slow_products_are_reported_with_a_remedy(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama", quantize=4)
    assert slow_matmuls(load_base(folder, "auto")) is None
    slow = slow_matmuls(load_base(folder, "auto", BaseOptions(quantized_compute="quantized")))
    assert slow is not None
    assert "--quantized-compute dequantized" in slow


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_rows_of_a_packed_matrix_match_the_whole(mode: str) -> None:
    layer = DequantizedLinear(nn.QuantizedLinear(128, 96, bias=False, mode=mode))
    packed = QuantizedHead(layer)
    whole = layer.unpacked(mx.float32)
    assert (packed.shape, packed.size) == (whole.shape, whole.size)
    assert mx.array_equal(packed[:], whole)
    assert mx.array_equal(packed[10:200], whole[10:])
    assert mx.array_equal(packed[mx.array([5, 3])], whole[mx.array([5, 3])])


def half(size: int) -> nn.Linear:
    linear = nn.Linear(size, size, bias=False)
    linear.weight = linear.weight.astype(mx.bfloat16)
    return linear


@pytest.mark.parametrize("kind", [slow(DequantizedLinear), StoredLinear])
def test_matrices_made_for_a_product_are_not_kept(kind: type) -> None:
    size, layers = 256, 256
    quantized = kind is DequantizedLinear
    plain = [
        nn.QuantizedLinear(size, size, bias=False) if quantized else half(size)
        for _ in range(layers)
    ]
    stack = [kind(layer) for layer in plain]
    x = mx.ones((4, size))
    mx.eval([layer.parameters() for layer in stack], x)

    def run(x: mx.array) -> mx.array:
        for layer in stack:
            x = layer(x)
        return x.sum()

    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with frees_arrays_above(before):
        mx.eval(mx.value_and_grad(run)(x))
    # Less than half of the 256 matrices are unpacked at the same time.
    assert mx.get_peak_memory() - before < layers / 2 * 4 * size**2


def test_replaced_layers_keep_their_parameters_and_are_still_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.QuantizedEmbedding(64, 64)
            self.first = nn.QuantizedLinear(64, 64)
            self.parts = [self.first, nn.QuantizedLinear(64, 64, mode="mxfp4", bias=False)]

    model = Tied()
    before = dict(tree_flatten(model.parameters()))

    assert stored_layers.compute_quantized(model, mx.float32, "dequantized") == "dequantized"

    after = dict(tree_flatten(model.parameters()))
    assert list(after) == list(before)
    assert all(mx.array_equal(after[name], value) for name, value in before.items())
    assert type(model.first) is DequantizedLinear
    assert model.first is model.parts[0]
    assert not model.trainable_parameters()["embed"]


def test_stored_embedding_gives_float32_of_what_mlx_gives() -> None:
    plain = nn.Embedding(10, 4)
    plain.weight = plain.weight.astype(mx.bfloat16)
    tokens = mx.array([[1, 7, 3]])
    found = stored_layers.StoredEmbedding(plain)(tokens)
    assert found.dtype == mx.float32
    assert mx.array_equal(found, plain(tokens).astype(mx.float32))


@pytest.mark.parametrize("bias", [False, True])
def test_stored_linear_multiplies_by_its_weight_in_float32(bias: bool) -> None:
    linear = nn.Linear(48, 32, bias=bias)
    linear.weight = linear.weight.astype(mx.bfloat16)
    stored = StoredLinear(linear)
    x = mx.random.normal((2, 3, 48), key=mx.random.key(0))

    def plain(x: mx.array) -> mx.array:
        y = x @ linear.weight.astype(mx.float32).T
        return y + linear.bias if bias else y

    assert mx.allclose(stored(x), plain(x), rtol=1e-5, atol=1e-6)
    assert mx.allclose(frozen_matmul(stored, x), plain(x) - plain(0 * x), rtol=1e-5, atol=1e-6)
    ours = mx.grad(lambda x: (stored(x) ** 2).sum())(x)
    theirs = mx.grad(lambda x: (plain(x) ** 2).sum())(x)
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_stored_experts_multiply_by_their_weights_in_float32(bias: bool) -> None:
    experts = SwitchLinear(48, 32, 5, bias=bias)
    if bias:
        experts.bias = mx.random.normal((5, 32), key=mx.random.key(1))
    wide = experts.weight = experts.weight.astype(mx.bfloat16)
    stored = StoredExperts(experts)
    assert stored.weight.dtype == mx.bfloat16
    experts.weight = wide.astype(mx.float32)
    x = mx.random.normal((2, 7, 1, 1, 48), key=mx.random.key(0))
    chosen = mx.random.randint(0, 5, (2, 7, 3), key=mx.random.key(2)).astype(mx.uint32)
    assert mx.allclose(stored(x, chosen), experts(x, chosen), rtol=1e-5, atol=1e-6)
    ours = mx.grad(lambda x: (stored(x, chosen) ** 2).sum())(x)
    theirs = mx.grad(lambda x: (experts(x, chosen) ** 2).sum())(x)
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("on_the_cpu")
def test_experts_stay_in_16_bits_where_the_cpu_computes_in_float32(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3_moe", dtype="bfloat16", **EXPERTS["qwen3_moe"])
    model = load_base(folder, "float32").model
    kinds = {type(module) for module in model.modules() if isinstance(module, SwitchLinear)}
    assert kinds == {StoredExperts}
    assert model(mx.array([[1, 2, 3]])).dtype == mx.float32


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A quantised model, opened as on a GPU."""
    folder = write_model(tmp_path / "model", "llama", quantize=4)
    monkeypatch.setattr(stored_layers, "on_cpu", lambda: False)
    return open_base(folder, "float32").model


def clock(seconds: list[float]) -> Callable[[], float]:
    """Return a fake clock: the n-th timed run takes `seconds[n]`."""

    def ticks() -> Iterator[float]:
        now = 0.0
        for second in seconds:
            yield now
            now += second
            yield now

    return ticks().__next__


def test_median_after_warming_up_decides(base: nn.Module) -> None:
    runs = [90.0, 90.0, 3.0, 1.0, 2.0, 60.0, 1.5, 90.0, 90.0, 1.0, 1.4, 1.2, 1.3, 50.0]
    found = time_matmuls(base, mx.float32, 24, clock(runs))
    assert found is not None
    assert (found.name, found.tokens) == ("mlp.up_proj", 24)
    assert (found.quantized, found.dequantized) == pytest.approx((2.0, 1.3))
    assert found.faster == "dequantized"
    assert found.describe() == (
        "dequantized products: 1.3 s for 24 tokens of mlp.up_proj, forward and backward; "
        "quantized: 2 s"
    )


def test_form_without_memory_is_taken_unless_the_other_gains() -> None:
    assert TimedMatmuls("", 1, 1.0, 0.96).faster == "quantized"
    assert TimedMatmuls("", 1, 1.0, 0.94).faster == "dequantized"


def test_timed_products_use_the_largest_matrix_and_training_shapes(
    base: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = [], mx.vjp

    def vjp(layer: nn.Module, x: list[mx.array], cotangent: list[mx.array]) -> object:
        seen.append((type(layer), x[0].shape, cotangent[0].shape, x[0].dtype))
        outputs, gradients = real(layer, x, cotangent)
        assert all(
            np.isfinite(np.array(gradient.astype(mx.float32))).all() for gradient in gradients
        )
        return outputs, gradients

    monkeypatch.setattr(mx, "vjp", vjp)
    state = [np.array(each) for each in mx.random.state]
    time_matmuls(base, mx.bfloat16, 10)
    shapes = ((1, 10, 64), (1, 10, 96), mx.bfloat16)
    assert set(seen) == {(nn.QuantizedLinear, *shapes), (DequantizedLinear, *shapes)}
    assert all((np.array(a) == b).all() for a, b in zip(mx.random.state, state, strict=True))


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_stand_ins_compute_the_same_in_both_forms(mode: str) -> None:
    forms = stored_layers._stand_ins(nn.QuantizedLinear(64, 32, bias=True, mode=mode))
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    one, other = (np.array(form(x)) for form in forms)
    assert np.abs(one).max() > 0
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_form_that_raises_is_not_taken(base: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("[quantized_matmul] has no CUDA implementation")

    monkeypatch.setattr(nn.QuantizedLinear, "__call__", broken)
    found = time_matmuls(base, mx.float32, 8)
    assert found is not None
    assert found.faster == "dequantized"
    assert "quantized: not available" in found.describe()


def test_model_without_quantized_layers_has_no_choice(tmp_path: Path) -> None:
    model = open_base(write_model(tmp_path / "plain", "llama"), "float32").model
    assert time_matmuls(model, mx.float32, 8) is None


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_model_changes_its_storage_in_place(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", architecture, quantize=4)
    for module in (stored_layers, "mlxtune.backend.models.loading"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.on_cpu", lambda: False)
    before, after = open_base(folder, "float32"), load_base(folder, "float32")
    changed = with_matmul_form(before, "dequantized")
    expected = load_base(folder, "float32", BaseOptions(quantized_compute="dequantized"))
    kinds = [type(module) for _, module in changed.model.named_modules()]
    assert kinds == [type(module) for _, module in expected.model.named_modules()]
    assert changed.quantized_compute == "dequantized"
    assert with_matmul_form(after, "quantized") is after
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(changed.model(tokens), expected.model(tokens))
