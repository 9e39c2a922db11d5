"""Configs that contradict themselves or the model's weights."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.lora.apply import apply_lora
from mlxtune.backend.models.loading import open_base
from mlxtune.backend.models.model_config import config_problems
from mlxtune.config import InstructConfig
from mlxtune.errors import ModelError
from tests.experts import EXPERTS
from tests.models import write_model
from tests.slow import long, slow

# Sound configs, with missing, repeated or null entries as on the hub.
SOUND = {
    "qwen3": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "head_dim": None},
    "granite 4": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "step 3.5": {
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3.5": {"text_config": {"num_experts": 0, "num_experts_per_tok": 0, "num_heads": 4}},
    "jamba without experts": {"num_experts": 1, "num_experts_per_tok": 2},
    "openelm": {"num_query_heads": [12, 16], "num_kv_heads": [3, 4]},
    "mamba 2": {"time_step_limit": [0.0, float("inf")], "layer_norm_epsilon": 1e-5},
    "gemma 3n": {"vocab_size_per_layer_input": 262_144},
    "large experts": {"shared_expert_intermediate_size": 20_480},
    "awq": {"quantization_config": {"group_size": -1}, "vision_config": {"num_heads": "many"}},
    "deepseek": {"num_attention_heads": 128, "num_key_value_heads": 128, "n_group": 8}
    | {"n_routed_experts": 256, "num_experts_per_tok": 8, "topk_group": 4},
}


@pytest.mark.parametrize("config", SOUND.values(), ids=SOUND)
def test_sound_config_has_no_problems(config: dict[str, Any]) -> None:
    assert list(config_problems(config)) == []


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is more than 10,000"),
        ({"text_config": {"n_routed_experts": 10**8}}, "n_routed_experts is more than 10,000"),
        ({"hidden_size": "64"}, "hidden_size is not an integer: '64'"),
        ({"text_config": {"vocab_size": [320]}}, "vocab_size is not an integer: [320]"),
        ({"hidden_size": [64]}, "hidden_size is not an integer: [64]"),
        (
            {"max_position_embeddings": ["many"]},
            "max_position_embeddings is not an integer: ['many']",
        ),
        ({"moe_topk": ["two"]}, "moe_topk is not a list of integers: ['two']"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a finite number"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e+300, more than 1"),
        ({"rope_theta": 10**90}, "rope_theta is 1e+90, more than 1e+15"),
        (
            {"text_config": json.loads('{"rope_theta": 1e999}')},
            "rope_theta is inf, not a finite number",
        ),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0, not above 0"),
        ({"rope_theta": 0}, "rope_theta is 0, not above 0"),
        ({"rope_theta": True}, "rope_theta is True, not a number"),
        ({"text_config": {"rope_local_base_freq": "1e4"}}, "rope_local_base_freq is '1e4', not a"),
        ({"rope_scaling": {"factor": 0.0, "type": "yarn"}}, "factor is 0.0, not above 0"),
        ({"rope_scaling": {"short_factor": [1.0, 0]}}, "short_factor is 0, not above 0"),
        ({"rope_scaling": {"long_factor": [float("nan")]}}, "long_factor is nan, not a finite"),
        ({"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon is -1e-05, less than 0"),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok is not an integer: '2'"),
        ({"num_experts_per_token": True}, "num_experts_per_token is not an integer: True"),
        ({"moe_topk": "two"}, "moe_topk is not an integer: 'two'"),
        ({"moe_topk": [True]}, "moe_topk is not a list of integers: [True]"),
        ({"kv_lora_rank": 1.5}, "kv_lora_rank is not an integer: 1.5"),
        ({"n_head": False}, "n_head is not an integer: False"),
        ({"num_experts": 4.5}, "num_experts is not an integer: 4.5"),
        ({"text_config": {"head_dim": -1}}, "head_dim is -1, less than 0"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads is 4, which is not a multiple of num_key_value_heads (3)",
        ),
        (
            {"linear_num_value_heads": 4, "linear_num_key_heads": 8},
            "linear_num_value_heads is 4, which is not a multiple of linear_num_key_heads (8)",
        ),
        (
            {"num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5, but num_experts is 4",
        ),
        ({"num_local_experts": 4, "num_experts_per_tok": 0}, "num_experts_per_tok is 0, but num_"),
        ({"moe_num_experts": 4, "moe_k": -1}, "moe_k is -1, less than 0"),
        ({"num_experts": 4, "num_experts_per_token": 9}, "num_experts_per_token is 9, but num_"),
        (
            {"num_hidden_layers": 2, "layer_types": ["conv"] * 3},
            "layer_types has 3 entries, but num_hidden_layers is 2",
        ),
        (
            {"num_hidden_layers": 1, "layer_types": ["x"]},
            "layer_types has 'x', which is not a kind of",
        ),
        ({"num_hidden_layers": 1, "layer_types": 7}, "layer_types has 7 entries"),
    ],
)
def test_contradiction_is_named_by_its_keys(config: dict[str, Any], problem: str) -> None:
    (found,) = config_problems(config)
    assert found.startswith(problem)


def test_weight_of_another_shape_is_named_with_the_keys_that_explain_it(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe", **EXPERTS["qwen3_moe"])
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value, weight in (
        ("moe_intermediate_size", 48, "mlp.switch_mlp.gate_proj.weight the shape (4, 48, 64), but"),
        ("num_key_value_heads", 4, "self_attn.k_proj.weight the shape (64, 64), but the weights"),
        (
            "num_experts",
            8,
            "mlp.gate.weight the shape (8, 64), but the weights have the shape (4, 64)",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelError) as raised:
            open_base(tmp_path, "auto")
        file, problem, rest = str(raised.value).split(": ", 2)
        assert (file, problem) == (str(tmp_path / "config.json"), "does not fit the weights")
        assert weight in rest
        assert key in rest.partition(": check ")[2]


# Architectures whose configs have unusual keys.
ODD = ("deepseek_v3", "gemma4_text", "granitemoehybrid", "llama4", "qwen3_5_moe", "qwen3_next")


@pytest.mark.parametrize(
    "architecture",
    [
        expert if expert == "qwen3_moe" else slow(expert) if expert in ODD else long(expert)
        for expert in EXPERTS
    ],
)
def test_mutated_config_fails_in_one_line_or_is_harmless(tmp_path: Path, architecture: str) -> None:
    write_model(tmp_path, architecture, **EXPERTS[architecture])
    text = (tmp_path / "config.json").read_text()
    config, peak = InstructConfig(targets=("all",)), peak_bytes()
    for changed in mutated(json.loads(text)):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        started = time.process_time()
        try:
            apply_lora(open_base(tmp_path, "auto").model, config)
        except ModelError as error:
            assert "\n" not in str(error)
        # Only a loop over 10**8 items would take so long.
        assert time.process_time() - started < 5
    assert peak_bytes() - peak < 2**30


def mutated(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield copies of a config, each with one number or list replaced with a different value."""
    for key, value in config.items():
        others: list[Any] = []
        if isinstance(value, dict):
            others = list(mutated(value))
        elif isinstance(value, list):
            others = [value[:-1], [*value, *value[-1:]], ["x"] * len(value), "x"]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            others = [0, -1, 10**8, 3, "x", None]
        yield from ({**config, key: other} for other in others)


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
