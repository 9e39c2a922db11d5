"""Written adapters of LoRA's family give the trained model's outputs in mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import load_adapted
from mlxtune.backend.adapters.file_formats.adapter import WeightUpdate
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.lora.apply import adapted_modules
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.steps.execution import Execution
from mlxtune.errors import ModelError
from tests.backend.conftest import random_examples
from tests.models import write_model
from tests.slow import slow_except

TOKENS = mx.array([[5, 17, 3, 99, 250, 31, 8, 77, 120, 6, 14]])
FAMILY: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"rslora": True},
    "DoRA": {"dora": True},
    "PiSSA": {"init": "pissa"},
    "ranks": {"target_rank": ("q_proj=2", "1.self_attn.v_proj=6")},
    "PiSSA with ranks": {"init": "pissa_niter_8", "rslora": True, "target_rank": ("v_proj=3",)},
    "DoRA with ranks": {"dora": True, "rslora": True, "target_rank": ("v_proj=5",), "lr_ratio": 4},
}


@pytest.fixture(scope="module", params=[None, 4], ids=["float32", "quantised"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Qwen2's projections have biases.
    target = tmp_path_factory.mktemp("written") / "qwen2"
    return write_model(target, "qwen2", quantize=request.param)


def trained(folder: Path, **options: Any) -> InstructPipeline:
    """Return a pipeline that took two steps."""
    given = {"lora_rank": 4, "lora_alpha": 8.0, "learning_rate": 1e-2, **options}
    base = load_base(folder, "float32").model
    pipeline = InstructPipeline(base, InstructConfig(**given), execution=Execution(MLX))
    for _ in range(2):
        pipeline.train_batch(random_examples(3))
    pipeline.model.eval()
    return pipeline


def near(found: mx.array, expected: mx.array) -> bool:
    return mx.abs(found - expected).max().item() < 2e-5 * mx.abs(expected).max().item()


@pytest.mark.parametrize("member", slow_except(FAMILY, "PiSSA with ranks", "DoRA with ranks"))
def test_mlx_lm_computes_the_trained_outputs(folder: Path, tmp_path: Path, member: str) -> None:
    pipeline = trained(folder, **FAMILY[member])
    pipeline.write(tmp_path / "adapters.safetensors")
    expected = pipeline.model(TOKENS)
    plain = load_base(folder, "float32").model(TOKENS)
    assert mx.abs(expected - plain).max() > 1e-2

    theirs, _ = load(str(folder), adapter_path=str(tmp_path))
    theirs.set_dtype(mx.float32)
    assert near(theirs(TOKENS), expected)
    if "quantization" not in json.loads((folder / "config.json").read_text()):
        fused = [(name, m.fuse()) for name, m in theirs.named_modules() if hasattr(m, "fuse")]
        theirs.update_modules(tree_unflatten(fused))
        assert near(theirs(TOKENS), expected)

    adapted = load_adapted(load_base(folder, "float32"), AdapterFile.find(str(tmp_path)))
    assert near(adapted.model(TOKENS), expected)
    assert adapted.lora.scale == pipeline.lora.scale
    assert adapted.lora.keys == pipeline.lora.keys
    adapted.use_adapter(False)
    assert mx.array_equal(adapted.model(TOKENS), plain)
    adapted.use_adapter(True)
    assert near(adapted.model(TOKENS), expected)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("layers", "keys"),
    [(-1, None), (99, ["self_attn.q_proj", "mlp.up_proj"]), (1, ["self_attn.v_proj"])],
)
def test_adapters_that_mlx_lm_trained_are_loaded(
    folder: Path, tmp_path: Path, layers: int, keys: list[str] | None, dora: bool
) -> None:
    model, _ = load(str(folder))
    model.set_dtype(mx.float32)
    # No value of alpha makes alpha / rank exactly this scale.
    parameters = {"rank": 3, "scale": 0.1 + 0.2, "dropout": 0.0} | ({"keys": keys} if keys else {})
    model.freeze()
    linear_to_lora_layers(model, layers, parameters, use_dora=dora)
    rng = np.random.default_rng(0)
    filled = [
        (name, value + 0.1 * mx.array(rng.standard_normal(value.shape).astype("f4")))
        for name, value in tree_flatten(model.trainable_parameters())
    ]
    model.update(tree_unflatten(filled))
    mx.save_safetensors(
        str(tmp_path / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters()))
    )
    said = {"num_layers": layers, "lora_parameters": parameters} | (
        {"fine_tune_type": "dora"} if dora else {}
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))

    adapted = load_adapted(load_base(folder, "float32"), AdapterFile.find(str(tmp_path)))

    assert adapted.lora.scale == 0.1 + 0.2
    assert near(adapted.model(TOKENS), model(TOKENS))


def test_tensor_outside_lora_is_named(folder: Path, tmp_path: Path) -> None:
    said = {"num_layers": 2, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    pair = {"lora_a": np.zeros((320, 4), "f4"), "lora_b": np.zeros((4, 64), "f4")}
    for name, problem in {
        "model.embed_tokens": "model.embed_tokens, which is not a projection",
        "model.layers.0.input_layernorm": "is not a projection",
        "model.layers.9.self_attn.q_proj": "the model has no model.layers.9.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj": r"lora_a is \(320, 4\), but the model needs \(64, 4\)",
    }.items():
        tensors = {f"{name}.{leaf}": value for leaf, value in pair.items()}
        safetensors.numpy.save_file(tensors, tmp_path / "adapters.safetensors")
        with pytest.raises(ModelError, match=problem):
            load_adapted(load_base(folder, "float32"), AdapterFile.find(str(tmp_path)))
    safetensors.numpy.save_file({"x.m": np.zeros(3, "f4")}, tmp_path / "adapters.safetensors")
    with pytest.raises(ModelError, match=r"is not a lora adapter: it has x\.m"):
        load_adapted(load_base(folder, "float32"), AdapterFile.find(str(tmp_path)))


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    more=st.integers(0, 4),
    power=st.integers(-3, 3),
    experts=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_padding_and_folding_keep_the_product_and_are_undone(
    shape: tuple[int, int, int], more: int, power: int, experts: int, seed: int
) -> None:
    inputs, rank, outputs = shape
    rng = np.random.default_rng(seed)
    shapes = [(inputs, rank), (rank, outputs)]
    if experts:
        shapes = [(experts, rank, inputs), (experts, outputs, rank)]
    update = WeightUpdate(*(rng.standard_normal(each).astype("f4") for each in shapes))
    ratio = 2.0**power

    def product(update: WeightUpdate) -> Any:
        x, y = update.a.astype(np.float64), update.b.astype(np.float64)
        return y @ x if experts else x @ y

    wide = update.padded(rank + more, ratio)
    assert wide.rank == rank + more
    np.testing.assert_allclose(product(wide), ratio * product(update), atol=1e-12)
    again = wide.unpadded(rank, ratio)
    np.testing.assert_array_equal(again.a, update.a)
    np.testing.assert_array_equal(again.b, update.b)
    if more:
        with pytest.raises(ValueError, match=f"beyond rank {rank}"):
            WeightUpdate(np.ones_like(wide.a), np.ones_like(wide.b)).unpadded(rank, ratio)


def test_untrained_dora_does_not_change_the_outputs(folder: Path) -> None:
    plain = load_base(folder, "float32").model(TOKENS)
    config = InstructConfig(lora_rank=4, dora=True, targets=("all",))
    pipeline = InstructPipeline(load_base(folder, "float32").model, config)
    assert near(pipeline.model(TOKENS), plain)


def test_dora_row_of_zeros_stays_one_and_is_finite(folder: Path) -> None:
    base = load_base(folder, "float32").model
    if "scales" in base.layers[0].self_attn.q_proj:
        pytest.skip("a quantised row is not set to zero so simply")
    projection = base.layers[0].self_attn.q_proj
    projection.weight = projection.weight * (mx.arange(projection.weight.shape[0]) > 2)[:, None]
    pipeline = InstructPipeline(base, InstructConfig(lora_rank=4, dora=True))
    for _ in range(3):
        result = pipeline.train_batch(random_examples(3))
    assert np.isfinite(result.avg_loss)


def test_same_run_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for member in ("PiSSA with ranks", "DoRA with ranks"):
        written = []
        for name in "ab":
            (tmp_path / name).mkdir(exist_ok=True)
            trained(folder, **FAMILY[member]).snapshot()(tmp_path / name)
            written.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
            # MLX writes this file's metadata in no fixed order.
            del written[-1]["optimizer.safetensors"]
        assert written[0] == written[1]
        assert "parameters.safetensors" in written[0]


def test_pissa_uses_top_singular_vectors_of_dequantized_weight(folder: Path) -> None:
    config = InstructConfig(lora_rank=4, lora_alpha=8.0, init="pissa")
    pipeline = InstructPipeline(load_base(folder, "float32").model, config)
    for module in adapted_modules(pipeline.model).values():
        linear = module.linear
        weight = linear.weight
        if "scales" in linear:
            sizes = (linear.group_size, linear.bits)
            weight = mx.dequantize(weight, linear.scales, linear.biases, *sizes)
        u, s, vt = np.linalg.svd(np.array(weight).astype(np.float64), full_matrices=False)
        expected = (u[:, :4] * s[:4]) @ vt[:4]
        found = 2.0 * (np.array(module.lora_a) @ np.array(module.lora_b)).T
        np.testing.assert_allclose(found, expected, atol=1e-5)
        # Separate arrays, because a compiled step treats only frozen arrays as constants.
        assert module.principal.a is not module.lora_a
        assert mx.array_equal(module.principal.a, module.lora_a)
        # A and B share each singular value evenly.
        sizes_of_a = np.linalg.norm(np.array(module.lora_a), axis=0)
        np.testing.assert_allclose(sizes_of_a, np.sqrt(s[:4] / 2), rtol=1e-5)


def test_pissa_rank_above_the_weights_rank_is_an_error(folder: Path) -> None:
    config = InstructConfig(lora_rank=40, init="pissa", targets=("v_proj",))
    with pytest.raises(
        ModelError, match=r"v_proj has only 32 singular vectors, fewer than its rank of 40"
    ):
        InstructPipeline(load_base(folder, "float32").model, config)


def test_target_rank_of_no_target_is_an_error(folder: Path) -> None:
    config = InstructConfig(target_rank=("q_proj=2", "mlp.up_proj=3"))
    with pytest.raises(
        ModelError, match=r"--target-rank: no target is named mlp.up_proj; the targets are"
    ):
        InstructPipeline(load_base(folder, "float32").model, config)


def test_description_of_lora_lists_the_options_in_use(folder: Path) -> None:
    said = trained(folder, **FAMILY["DoRA with ranks"]).lora.describe()
    assert "rank 4 (v_proj 5), alpha 8 (scale 4 = alpha / √rank)" in said
    assert said.endswith("; DoRA; B learns 4 times as fast as A")
    assert trained(folder, init="pissa").lora.describe().endswith("; initialised by pissa")
