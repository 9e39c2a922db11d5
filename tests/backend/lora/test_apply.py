"""LoRA's projections, their initial matrices, and their outputs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.lora.apply import adapted_modules, apply_lora
from mlxtune.backend.lora.lora_layers import DropoutKeys, LoRALinear, step_keys
from mlxtune.backend.models.loading import open_base
from mlxtune.config import InstructConfig
from mlxtune.errors import ModelError
from tests.backend.conftest import MakePipeline
from tests.experts import EXPERTS
from tests.models import write_model


def lora_linear(
    linear: nn.Module, *, rank: int = 4, dropout: float = 0.0, rows: mx.array | None = None
) -> LoRALinear:
    return LoRALinear(
        linear,
        rank=rank,
        scale=2.0,
        dropout=dropout,
        key=mx.random.key(0),
        dropout_keys=DropoutKeys(rows),
        salt=5,
    )


def test_layer_adds_the_scaled_low_rank_product() -> None:
    linear = nn.Linear(8, 6)
    layer = lora_linear(linear)
    layer.lora_b = mx.random.normal((4, 6))
    x = mx.random.normal((2, 3, 8))
    weight = np.array(linear.weight) + 2.0 * np.array(layer.lora_b).T @ np.array(layer.lora_a).T
    expected = np.array(x) @ weight.T + np.array(linear.bias)
    np.testing.assert_allclose(np.array(layer(x)), expected, atol=1e-5)


def test_a_is_kaiming_uniform_and_b_is_zero() -> None:
    layer = lora_linear(nn.Linear(400, 10), rank=64)
    values = np.array(layer.lora_a)
    bound = 1 / math.sqrt(400)  # kaiming_uniform_(a=√5): √(6 / ((1 + 5) fan_in))
    assert values.shape == (400, 64)
    assert values.dtype == np.float32
    assert np.abs(values).max() <= bound
    assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not np.array(layer.lora_b).any()


def test_untrained_adapter_does_not_change_the_outputs() -> None:
    linear = nn.Linear(8, 6)
    x = mx.random.normal((2, 3, 8))
    assert mx.array_equal(lora_linear(linear)(x), linear(x))


def test_quantized_layer_keeps_its_shapes() -> None:
    layer = lora_linear(nn.Linear(64, 32).to_quantized(group_size=32, bits=4))
    assert layer.lora_a.shape == (64, 4)
    assert layer.lora_b.shape == (4, 32)
    assert layer(mx.zeros((1, 2, 64))).shape == (1, 2, 32)


def test_dropout_zeroes_its_fraction_and_scales_the_rest() -> None:
    layer = lora_linear(nn.Linear(1000, 4), dropout=0.25, rows=step_keys(0, 1, (1, 2)))
    dropped = np.array(layer._drop(mx.ones((2, 50, 1000))))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    assert (dropped == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert not np.array_equal(dropped[0], dropped[1])
    assert not np.array_equal(dropped[0, 0], dropped[0, 1])


def test_dropout_of_a_row_ignores_other_rows_and_padding() -> None:
    layer = lora_linear(nn.Linear(32, 4), dropout=0.5)
    layer._dropout_keys.keys = step_keys(0, 1, (7,))
    alone = layer._drop(mx.ones((1, 5, 32)))
    layer._dropout_keys.keys = step_keys(0, 1, (3, 7))
    padded = layer._drop(mx.ones((2, 9, 32)))
    assert mx.array_equal(alone[0], padded[1, :5])


def test_dropout_of_two_layers_differs_for_the_same_row(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline("qwen3", dropout=0.5, targets=("q_proj", "v_proj"))
    first = pipeline.model.layers[0].self_attn
    x = mx.ones((1, 6, first.q_proj.lora_a.shape[0]))
    first.q_proj._dropout_keys.keys = step_keys(0, 1, (7,))
    second = pipeline.model.layers[1].self_attn
    masks = [np.array(layer._drop(x)) for layer in (first.q_proj, first.v_proj, second.q_proj)]
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[0], masks[2])


@pytest.mark.parametrize(
    ("targets", "keys"),
    [
        (("q_proj", "v_proj"), {"self_attn.q_proj", "self_attn.v_proj"}),
        (("self_attn.o_proj",), {"self_attn.o_proj"}),
        (("mlp.up_proj", "down_proj"), {"mlp.up_proj", "mlp.down_proj"}),
        (
            ("all",),
            {f"self_attn.{name}_proj" for name in "qkvo"}
            | {f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        ),
    ],
)
def test_targets_match_by_name_by_path_and_all(
    make_pipeline: MakePipeline, targets: tuple[str, ...], keys: set[str]
) -> None:
    lora = make_pipeline("llama", targets=targets).lora
    assert set(lora.keys) == keys
    assert lora.modules == 2 * len(keys)
    assert lora.layers == 2


def test_target_that_matches_nothing_is_an_error_beside_one_that_matches(
    make_pipeline: MakePipeline,
) -> None:
    with pytest.raises(ModelError) as caught:
        make_pipeline("llama", targets=("q_proj", "v_porj", "proj"))
    assert "v_porj (did you mean v_proj?), proj" in str(caught.value)
    assert "self_attn.q_proj" in str(caught.value)
    assert "mlp.down_proj" in str(caught.value)


def test_num_layers_takes_the_last_layers(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline("gemma3_text", num_layers=1)
    names = [name for name, _ in tree_flatten(pipeline.model.trainable_parameters())]
    assert {name.split(".")[2] for name in names} == {"2"}
    assert pipeline.lora.num_layers == pipeline.lora.layers == 1
    with pytest.raises(ModelError, match="--num-layers 9: the model has 3 layers"):
        make_pipeline("gemma3_text", num_layers=9)


def test_projection_matrices_depend_only_on_seed_and_name(
    make_pipeline: MakePipeline,
) -> None:
    name = "model.layers.1.self_attn.v_proj.lora_a"

    def matrix(**config: object) -> mx.array:
        pipeline = make_pipeline("llama", **config)
        return dict(tree_flatten(pipeline.model.trainable_parameters()))[name]

    assert mx.array_equal(matrix(), matrix(targets=("all",), num_layers=1))
    assert not mx.array_equal(matrix(), matrix(seed=1))


def test_trainable_parameters_and_their_fraction_are_counted(make_pipeline: MakePipeline) -> None:
    lora = make_pipeline("llama", targets=("q_proj",)).lora
    assert lora.trainable_parameters == 2 * (64 * 4 + 4 * 64)  # layers * (in * rank + rank * out)
    assert f"{lora.trainable_parameters / lora.total_parameters:.3%}" in lora.describe()


def test_experts_get_lora_of_their_own(make_pipeline: MakePipeline) -> None:
    config = EXPERTS["qwen3_moe"]
    pipeline = make_pipeline("qwen3_moe", model_config=config, targets=("down_proj",))
    shapes = {
        name: value.shape for name, value in tree_flatten(pipeline.model.trainable_parameters())
    }
    name = "model.layers.0.mlp.switch_mlp.down_proj"
    assert shapes[f"{name}.lora_a"] == (4, 4, 32)
    assert shapes[f"{name}.lora_b"] == (4, 64, 4)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "gemma4_text", "hunyuan", "llama4"])
def test_target_of_experts_and_others_is_reported_by_name_and_count(
    tmp_path: Path, architecture: str
) -> None:
    experts, others = {
        "deepseek_v3": ("mlp.switch_mlp", ["mlp", "mlp.shared_experts"]),
        "gemma4_text": ("experts.switch_glu", ["mlp"]),
        "hunyuan": ("mlp.switch_mlp", ["mlp.shared_mlp"]),
        "llama4": ("feed_forward.experts", ["feed_forward", "feed_forward.shared_expert"]),
    }[architecture]
    write_model(tmp_path, architecture, **EXPERTS[architecture])
    config = InstructConfig(targets=("gate_proj",))
    lora = apply_lora(open_base(tmp_path, "auto").model, config)
    layers = {"deepseek_v3": 1}.get(architecture, 2)
    assert f"(with {4 * layers} matrices of experts)" in lora.describe()
    (line,) = re.findall("; (gate_proj matches .*)", lora.describe())
    for name in (experts, *others):
        assert f" {name}.gate_proj in {layers} layer" in line
    assert line.count(".gate_proj in ") == 1 + len(others)


def test_summary_is_a_value_without_the_state_of_dropout(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    config, keys = InstructConfig(dropout=0.5), DropoutKeys()
    model = open_base(tmp_path, "auto").model
    summary = apply_lora(model, config, keys)
    layer = next(iter(adapted_modules(model).values()))
    tokens = mx.ones((1, 3, layer.lora_a.shape[0]))
    layer.lora_b = mx.ones_like(layer.lora_b)
    whole = layer(tokens)
    keys.set(step_keys(0, 1, (1,)), None)
    assert not mx.array_equal(layer(tokens), whole)
    assert {summary} == {apply_lora(open_base(tmp_path, "auto").model, config)}


def test_untrained_experts_with_a_dense_namesake_are_a_warning(tmp_path: Path) -> None:
    write_model(tmp_path, "deepseek_v3", **EXPERTS["deepseek_v3"])

    def warnings(*targets: str) -> list[str]:
        config = InstructConfig(targets=targets)
        return list(apply_lora(open_base(tmp_path, "auto").model, config).warnings())

    assert warnings("mlp.up_proj", "o_proj") == [
        "--targets mlp.up_proj,o_proj leaves experts untrained: mlp.switch_mlp.up_proj in 1 layer: "
        "add mlp.switch_mlp.up_proj to train them too"
    ]
    assert warnings("o_proj") == warnings("mlp.up_proj", "mlp.switch_mlp.up_proj", "o_proj") == []


def test_experts_with_most_of_the_parameters_are_a_warning(tmp_path: Path) -> None:
    write_model(tmp_path, "olmoe", **EXPERTS["olmoe"])
    config = InstructConfig(targets=("down_proj", "q_proj"), lora_rank=2)
    lora = apply_lora(open_base(tmp_path, "auto").model, config)
    # At rank 2, two layers have four experts (96 to 64) and one projection (64 to 64) each.
    experts, rest = 2 * 2 * 4 * (96 + 64), 2 * 2 * (64 + 64)
    assert lora.trainable_parameters == experts + rest
    (warning,) = lora.warnings()
    assert warning.startswith(f"{experts / (experts + rest):.0%} of the adapter's 3,072 parameters")
    assert warning.endswith("or set a lower --target-rank to mlp.switch_mlp.down_proj")
