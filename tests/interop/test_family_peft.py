"""LoRA's family against PEFT on torch: initial values, outputs, gradients and trained adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.adapters.checkpoint_tensors import adapter_tensors
from mlxtune.backend.adapters.initialize import init_pissa
from mlxtune.backend.lora.apply import adapted_modules
from mlxtune.backend.lora.lora_layers import DoRALinear, DropoutKeys, LoRALinear, step_keys
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from tests.backend.conftest import fill_lora_b
from tests.models import VOCAB_SIZE, write_model

torch = pytest.importorskip("torch", reason="compares with PEFT, which needs torch")
peft = pytest.importorskip("peft", reason="compares with PEFT")
optimizers = pytest.importorskip("peft.optimizers")
transformers = pytest.importorskip("transformers")

# The libraries warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")
Arrays = dict[str, npt.NDArray[Any]]
TARGETS = ["q_proj", "v_proj", "down_proj"]
FAMILY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LoRA": ({}, {}),
    "rsLoRA": ({"rslora": True}, {"use_rslora": True}),
    "DoRA": ({"dora": True}, {"use_dora": True}),
    "ranks": ({"target_rank": ("q_proj=2", "1.mlp.down_proj=6")},) * 1
    + ({"rank_pattern": {"q_proj": 2, "1.mlp.down_proj": 6}},),
    "all": (
        {"rslora": True, "dora": True, "target_rank": ("v_proj=7",)},
        {"use_rslora": True, "use_dora": True, "rank_pattern": {"v_proj": 7}},
    ),
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("peft") / request.param, request.param)


def ours(folder: Path, **options: Any) -> InstructPipeline:
    given = {"lora_rank": 4, "lora_alpha": 8.0, "targets": tuple(TARGETS), **options}
    config = InstructConfig(gradient_clip_norm=0.0, **given)
    return InstructPipeline(load_base(folder, "float32").model, config)


def theirs(folder: Path, **options: Any) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **options}
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **given))


_LEAVES = {
    "lora_a": "lora_A.default.weight",
    "lora_b": "lora_B.default.weight",
    "m": "lora_magnitude_vector.default.weight",
}


def tensor_of(model: Any, name: str) -> Any:
    """Return the parameter of PEFT's model that corresponds to a name in mlxtune."""
    module, _, leaf = name.rpartition(".")
    return model.get_parameter(f"base_model.model.{module}.{_LEAVES[leaf]}")


def parameters(pipeline: InstructPipeline) -> Arrays:
    return {name: np.array(x) for name, x in tree_flatten(pipeline.model.trainable_parameters())}


def give(model: Any, pipeline: InstructPipeline) -> None:
    """Copy the pipeline's initial values into PEFT's model."""
    with torch.no_grad():
        for name, value in parameters(pipeline).items():
            tensor_of(model, name).copy_(torch.from_numpy(value.T.copy()))


def example(seed: int = 0) -> Example:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, 24).astype(np.uint8)
    mask[-1] = 1
    return Example(1, rng.integers(0, VOCAB_SIZE, 24).astype(np.int32), mask)


def loss_of(model: Any, one: Example) -> Any:
    tokens = torch.from_numpy(one.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    return losses[torch.from_numpy(one.assistant_mask[1:].astype(bool))].mean()


def assert_near(found: npt.NDArray[Any], expected: npt.NDArray[Any], tolerance: float) -> None:
    assert np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("member", FAMILY)
def test_outputs_and_gradients_match_peft(folder: Path, member: str) -> None:
    options, of_peft = FAMILY[member]
    pipeline, model = ours(folder, **options), theirs(folder, **of_peft)
    fill_lora_b(pipeline)
    if options.get("dora"):
        sizes = {
            k: v * np.linspace(0.8, 1.3, v.size, dtype="f4")
            for k, v in parameters(pipeline).items()
            if k.endswith(".m")
        }
        pipeline.model.load_weights([(k, mx.array(v)) for k, v in sizes.items()], strict=False)
    give(model, pipeline)
    one = example()

    logits = model(input_ids=torch.from_numpy(one.tokens.astype(np.int64))[None]).logits
    found = pipeline.model(mx.array(one.tokens)[None])
    assert_near(np.array(found), logits.detach().numpy(), 1e-5)

    expected = loss_of(model, one)
    expected.backward()
    result = pipeline.loss_and_gradients([one])
    loss, gradients = result.loss, result.gradients
    assert loss == pytest.approx(float(expected), rel=1e-5)
    flat = {name: np.array(value) for name, value in tree_flatten(gradients)}
    assert len(flat) == sum(p.requires_grad for p in model.parameters())
    largest = max(np.abs(value).max() for value in flat.values())
    for name, value in flat.items():
        other = tensor_of(model, name).grad.numpy().T
        assert np.abs(value - other).max() <= 1e-5 * largest, name
        assert np.abs(value).max() > 1e-5, name


@pytest.mark.parametrize("bias", [False, True])
def test_dora_drops_what_peft_drops(bias: bool) -> None:
    linear = nn.Linear(16, 12, bias=bias)
    keys = DropoutKeys(step_keys(0, 1, (3, 4)))
    layer = DoRALinear(
        linear, rank=3, scale=2.0, dropout=0.4, key=mx.random.key(0), dropout_keys=keys, salt=1
    )
    layer.lora_b = 0.3 * mx.random.normal((3, 12))
    layer.m = layer.m * mx.linspace(0.7, 1.4, 12)
    x = mx.random.normal((2, 5, 16))
    factor = np.array(layer._drop(mx.ones_like(x)))  # dropout: 0 or 1 / 0.6

    base = torch.nn.Sequential(torch.nn.Linear(16, 12, bias=bias))
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["0"], use_dora=True, lora_dropout=0.4
    )
    model = peft.get_peft_model(base, config).train()
    inner = model.base_model.model[0]

    class Given(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * torch.from_numpy(factor)

    inner.lora_dropout["default"] = Given()
    with torch.no_grad():
        inner.base_layer.weight.copy_(torch.from_numpy(np.array(linear.weight)))
        if bias:
            inner.base_layer.bias.copy_(torch.from_numpy(np.array(linear.bias)))
        for leaf, name in _LEAVES.items():
            value = np.array(getattr(layer, leaf))
            inner.get_parameter(name).copy_(torch.from_numpy(value.T.copy()))
    expected = model(torch.from_numpy(np.array(x))).detach().numpy()
    assert (factor == 0).any()
    np.testing.assert_allclose(np.array(layer(x)), expected, atol=2e-6)


@pytest.mark.parametrize("member", ["LoRA", "DoRA"])
def test_steps_with_two_rates_match_peft(folder: Path, member: str) -> None:
    options, of_peft = FAMILY[member]
    rate, ratio, decay = 1e-3, 8.0, 0.1
    pipeline = ours(folder, lr_ratio=ratio, learning_rate=rate, weight_decay=decay, **options)
    model = theirs(folder, **of_peft)
    fill_lora_b(pipeline)
    give(model, pipeline)
    before = parameters(pipeline)
    optimizer = optimizers.create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=rate, loraplus_lr_ratio=ratio, loraplus_weight_decay=decay
    )
    for seed in range(4):
        optimizer.zero_grad()
        loss_of(model, example(seed)).backward()
        optimizer.step()
        pipeline.train_step(example(seed))
    for name, value in parameters(pipeline).items():
        moved = tensor_of(model, name).detach().numpy().T - before[name]
        assert np.abs(moved).max() > (1 if name.endswith("lora_a") else ratio) * rate
        # Adam turns rounding errors in tiny gradients into full steps, so a few entries differ.
        wrong = np.abs((value - before[name]) - moved) > 1e-3 * np.abs(moved).max()
        assert wrong.mean() < 1e-2, name


def effective(weight: npt.NDArray[Any], module: Any) -> npt.NDArray[Any]:
    """Return the weight (out, in) with the update of one of mlxtune's LoRA modules."""
    a, b = (np.array(x, dtype=np.float64) for x in module.factors())
    return weight + module.scale * (a @ b).T


def test_pissa_begins_as_in_peft(folder: Path) -> None:
    pipeline, model = ours(folder, init="pissa"), theirs(folder, init_lora_weights="pissa")
    for name, module in adapted_modules(pipeline.model).items():
        other = model.get_submodule(f"base_model.model.{name}")
        weight = np.array(module.linear.weight)
        a, b = np.array(module.lora_a), np.array(module.lora_b)
        a0, b0 = np.array(module.principal.a), np.array(module.principal.b)
        residual = weight - module.scale * (a0 @ b0).T
        left, values, right = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
        rank = a.shape[1]
        assert_near(residual, weight - (left[:, :rank] * values[:rank]) @ right[:rank], 1e-6)
        # PEFT's own error, in torch's float32, is up to 1.1e-5.
        assert_near(residual, other.base_layer.weight.detach().numpy(), 2e-5)
        their_a = other.lora_A["default"].weight.detach().numpy().T
        their_b = other.lora_B["default"].weight.detach().numpy().T
        # Singular vectors may differ in sign.
        signs = np.sign((a * their_a).sum(axis=0))
        np.testing.assert_allclose(a * signs, their_a, atol=1e-4)
        np.testing.assert_allclose(b * signs[:, None], their_b, atol=1e-4)
    tokens = mx.array(example().tokens)[None]
    plain = load_base(folder, "float32").model(tokens)
    assert_near(np.array(pipeline.model(tokens)), np.array(plain), 1e-5)


def test_pissa_trains_as_in_peft_and_is_written_as_peft_converts_it(
    folder: Path, tmp_path: Path
) -> None:
    rate = 1e-3
    pipeline = ours(folder, init="pissa", learning_rate=rate, weight_decay=0.0)
    model = theirs(folder, init_lora_weights="pissa")
    # With `pissa` in the saved config, PEFT would subtract the principal part again when loading.
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = "pissa"
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    for seed in range(3):
        optimizer.zero_grad()
        loss_of(model, example(seed)).backward()
        optimizer.step()
        pipeline.train_step(example(seed))
    model.save_pretrained(
        tmp_path / "end", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    from safetensors.numpy import load_file

    converted = load_file(tmp_path / "end" / "adapter_model.safetensors")
    written = adapter_tensors(pipeline.model, pipeline.lora)
    for name, module in adapted_modules(pipeline.model).items():
        weight = np.array(module.linear.weight)
        other = model.get_submodule(f"base_model.model.{name}")
        theirs_now = other.base_layer.weight + other.get_delta_weight("default")
        moved = theirs_now.detach().numpy() - weight
        assert np.abs(moved).max() > 1e-3
        found = effective(weight, module) - weight
        assert np.abs(found - moved).max() <= 2e-2 * np.abs(moved).max()
        a, b = (np.array(written[f"{name}.{leaf}"]) for leaf in ("lora_a", "lora_b"))
        their_a, their_b = (
            converted[f"base_model.model.{name}.{leaf}.weight"].T for leaf in ("lora_A", "lora_B")
        )
        assert (a.shape, b.shape) == (their_a.shape, their_b.shape)
        delta, their_delta = module.scale * a @ b, module.scale * their_a @ their_b
        assert np.abs(delta - their_delta).max() <= 2e-2 * np.abs(moved).max()


def test_iterations_find_what_peft_finds() -> None:
    # Singular values decay, as in a trained model's weights.
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((n, 24)))[0] for n in (40, 24))
    weight = (u * 0.4 ** np.arange(24)) @ v.T
    linear = nn.Linear(24, 40, bias=False)
    linear.weight = mx.array(weight.astype(np.float32))
    layer = LoRALinear(
        linear,
        rank=4,
        scale=2.0,
        dropout=0.0,
        key=mx.random.key(0),
        dropout_keys=DropoutKeys(),
        salt=0,
    )
    init_pissa({"0": layer}, "pissa_niter_4", 0)
    base = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=False))
    with torch.no_grad():
        base[0].weight.copy_(torch.from_numpy(np.array(linear.weight)))
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["0"], init_lora_weights="pissa_niter_4"
    )
    inner = peft.get_peft_model(base, config).base_model.model[0]
    found = 2.0 * (np.array(layer.lora_a) @ np.array(layer.lora_b)).T
    expected = 2.0 * (inner.lora_B["default"].weight @ inner.lora_A["default"].weight)
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-3)
