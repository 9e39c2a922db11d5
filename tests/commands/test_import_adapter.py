"""`mlxtune import`: adapters of mlx-lm and PEFT, and invalid adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import load_adapted
from mlxtune.backend.models.loading import load_base
from mlxtune.commands.import_adapter import FILES
from tests.command import Cli, files_in

TOKENS = [[5, 17, 80, 3]]


@pytest.fixture(scope="session")
def model(deep_model: Path) -> Path:
    return deep_model


def mlx_lm_made(model: Path, folder: Path, num_layers: int = 1) -> np.ndarray:
    """Make mlx-lm write an adapter with random tensors; return mlx-lm's logits with the adapter."""
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load

    loaded, _ = load(str(model))
    parameters = {
        "rank": 4,
        "scale": 1.7,
        "dropout": 0.0,
        "keys": ["self_attn.q_proj", "mlp.up_proj"],
    }
    loaded.freeze()
    linear_to_lora_layers(loaded, num_layers, parameters)
    rng = np.random.default_rng(0)
    tensors = {
        name: mx.array(0.2 * rng.standard_normal(value.shape), dtype=mx.float32)
        for name, value in tree_flatten(loaded.trainable_parameters())
    }
    loaded.update(tree_unflatten(list(tensors.items())))
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "num_layers": num_layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"model": str(model)}))
    loaded.eval()
    return np.array(loaded(mx.array(TOKENS)))


@pytest.mark.parametrize("num_layers", [1, -1])
def test_adapter_of_mlx_lm_is_used_unchanged(
    cli: Cli, model: Path, tmp_path: Path, num_layers: int
) -> None:
    expected = mlx_lm_made(model, tmp_path / "theirs", num_layers)
    outcome = cli("import", tmp_path / "theirs", "--output", tmp_path / "ours")
    assert outcome.code == 0, outcome.err
    files = ["adapter_config.json", "adapters.safetensors", FILES]
    assert files_in(tmp_path / "ours") == files
    ours = load_adapted(load_base(model, "float32"), AdapterFile.find(str(tmp_path / "ours")))
    np.testing.assert_allclose(np.array(ours.model(mx.array(TOKENS))), expected, rtol=0, atol=1e-5)


def peft_folder(folder: Path, **config: Any) -> Path:
    """Write a PEFT folder in PEFT 0.21's format, for q_proj of the second layer."""
    folder.mkdir()
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    rng = np.random.default_rng(0)
    tensors = {
        f"{name}.lora_A.weight": rng.standard_normal((2, 64)).astype(np.float32),
        f"{name}.lora_B.weight": rng.standard_normal((64, 2)).astype(np.float32),
    }
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def test_adapter_of_peft_gets_mlx_lms_names_shapes_and_scale(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    theirs = peft_folder(tmp_path / "theirs")
    outcome = cli("import", theirs, "--model-path", model, "--output", tmp_path / "ours")
    assert outcome.code == 0, outcome.err
    before = safetensors.numpy.load_file(theirs / "adapter_model.safetensors")
    after = safetensors.numpy.load_file(tmp_path / "ours" / "adapters.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    assert after.keys() == {f"{name}.lora_a", f"{name}.lora_b"}
    for ours, part in ("lora_a", "lora_A"), ("lora_b", "lora_B"):
        np.testing.assert_array_equal(
            after[f"{name}.{ours}"], before[f"base_model.model.{name}.{part}.weight"].T
        )
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["num_layers"] == 1
    assert config["lora_parameters"] == {
        **{"rank": 2, "scale": 1.5, "dropout": 0.0},
        "keys": ["self_attn.q_proj"],
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': only LORA is supported"),
        ({"bias": "all"}, "bias"),
        (
            {"modules_to_save": ["lm_head"], "fan_in_fan_out": True},
            "modules_to_save, fan_in_fan_out",
        ),
        ({"r": 4}, "gives rank 4"),
        ({"lora_alpha": None}, "has no valid r and lora_alpha"),
        ({"lora_alpha": 10**400}, "has a number of more than 100 digits"),
        ({"lora_alpha": float("inf")}, "adapter_config.json is not valid JSON"),
        ({"lora_alpha": 0}, "lora_alpha 0.0 is out of range"),
        ({"lora_dropout": "much"}, "lora_dropout must be at least 0 and below 1"),
        ({"lora_dropout": 1}, "lora_dropout must be at least 0 and below 1"),
        ({"lora_dropout": float("nan")}, "adapter_config.json is not valid JSON"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern or alpha_pattern is not an object"),
        ({"rank_pattern": {"[": 2}}, "the pattern [ is not the name of a module"),
        ({"alpha_pattern": {"(.*)(.*)q_proj": 2}}, "the pattern (.*)(.*)q_proj is not the name"),
        ({"alpha_pattern": {"^model.layers.1.self_attn.q_proj": "two"}}, "to float: 'two'"),
        ({"alpha_pattern": {r"1\.self_attn\.q.proj": "three"}}, "to float: 'three'"),
        ({"alpha_pattern": {"k_proj|q_proj": "four"}}, "to float: 'four'"),
        ({"lora_alpha": 1e38}, "lora_alpha 1e+38 is out of range"),
        ({"lora_alpha": 1e308}, "lora_alpha 1e+308 is out of range"),
        ({"lora_alpha": "nan"}, "lora_alpha nan is out of range"),
        ({"target_parameters": 5}, "target_parameters must be a list of names"),
        ({"target_parameters": [["x"]]}, "target_parameters must be a list of names"),
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"base_model_name_or_path": "no such/model at all"}, "pass --model-path"),
    ],
)
def test_unsupported_peft_config_is_named(
    cli: Cli, model: Path, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    theirs = peft_folder(tmp_path / "theirs", **config)
    base = [] if "base_model_name_or_path" in config else ["--model-path", model]
    assert said in cli("import", theirs, *base, "--output", tmp_path / "ours").error
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("others", [["vision_tower"], ["model.model", "model.other"]])
def test_modules_without_a_counterpart_in_the_base_are_refused(
    cli: Cli, model: Path, tmp_path: Path, others: list[str]
) -> None:
    weights = peft_folder(tmp_path / "theirs") / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    renamed = {
        name.replace("model.model.model", f"model.{other}"): value
        for other in others
        for name, value in tensors.items()
    }
    safetensors.numpy.save_file(renamed, weights)
    outcome = cli("import", weights.parent, "--model-path", model, "--output", tmp_path / "ours")
    assert "the base model does not have exactly one module for" in outcome.error
    assert f"{others[-1].rpartition('model.')[2]}.layers.1.self_attn.q_proj" in outcome.error


@pytest.mark.parametrize("shape", [(1,), (63,), (64, 1)])
def test_magnitudes_of_another_shape_are_refused(
    cli: Cli, model: Path, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    theirs = peft_folder(tmp_path / "theirs", use_dora=True)
    file = theirs / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector"
    safetensors.numpy.save_file(tensors | {name: np.ones(shape, np.float32)}, file)
    outcome = cli("import", theirs, "--model-path", model, "--output", tmp_path / "ours")
    assert f"has DoRA magnitudes of shape {shape}, but its layer needs (64,)" in outcome.error
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("pattern", ["^q_proj", "^self_attn.q_proj", "k_proj|v_proj", "proj"])
def test_pattern_that_names_another_module_changes_nothing(
    cli: Cli, model: Path, tmp_path: Path, pattern: str
) -> None:
    theirs = peft_folder(tmp_path / "theirs", alpha_pattern={pattern: "two"})
    outcome = cli("import", theirs, "--model-path", model, "--output", tmp_path / "ours")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("scale", [1e38, 1e308, "nan", "inf"])
def test_scale_of_mlx_lms_that_no_float32_can_hold_is_refused(
    cli: Cli, model: Path, tmp_path: Path, scale: Any
) -> None:
    mlx_lm_made(model, tmp_path / "theirs")
    path = tmp_path / "theirs" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["lora_parameters"]["scale"] = scale
    path.write_text(json.dumps(config))
    outcome = cli("import", tmp_path / "theirs", "--output", tmp_path / "ours")
    assert "lora_parameters has no valid rank and scale" in outcome.error


def test_scales_too_different_for_one_are_refused(cli: Cli, model: Path, tmp_path: Path) -> None:
    theirs = peft_folder(tmp_path / "theirs", lora_alpha=1e29, alpha_pattern={"k_proj": 1e-7})
    file = theirs / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "base_model.model.model.layers.1.self_attn.{}.{}.weight"
    tensors |= {
        name.format("k_proj", "lora_A"): np.ones((2, 64), np.float32),
        name.format("k_proj", "lora_B"): np.ones((32, 2), np.float32),
        name.format("q_proj", "lora_B"): np.full((64, 2), 1e4, np.float32),
    }
    safetensors.numpy.save_file(tensors, file)
    outcome = cli("import", theirs, "--model-path", model, "--output", tmp_path / "ours")
    assert "differ too much for one scale" in outcome.error


def test_ranks_so_unequal_that_filling_them_up_takes_too_much_are_refused(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.adapters.file_formats import peft

    theirs = peft_folder(tmp_path / "theirs", rank_pattern={"k_proj": 40})
    tensors = safetensors.numpy.load_file(theirs / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.k_proj"
    tensors |= {
        f"{name}.lora_A.weight": np.ones((40, 64), np.float32),
        f"{name}.lora_B.weight": np.ones((32, 40), np.float32),
    }
    safetensors.numpy.save_file(tensors, theirs / "adapter_model.safetensors")
    given = ("import", theirs, "--model-path", model, "--output", tmp_path / "ours")
    monkeypatch.setattr(peft, "_MAX_PADDED_BYTES", 1000)
    monkeypatch.setattr(peft, "_MAX_PADDED_RATIO", 1.5)
    assert "ranks from 2 to 40" in cli(*given).error
    monkeypatch.setattr(peft, "_MAX_PADDED_RATIO", 16)
    assert cli(*given).code == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name: {name: np.full((64, 2), np.nan, np.float32)}, "NaN or infinite values in"),
        (lambda name: {"x" * 2000 + name: np.ones(2, np.float32)}, "name has 2,0"),
    ],
    ids=["nan", "long name"],
)
def test_implausible_weights_are_refused(
    cli: Cli, model: Path, tmp_path: Path, change: Any, said: str
) -> None:
    theirs = peft_folder(tmp_path / "theirs")
    path = theirs / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = next(name for name in tensors if "lora_B" in name)
    safetensors.numpy.save_file(tensors | change(name), path)
    error = cli("import", theirs, "--model-path", model, "--output", tmp_path / "ours").error
    assert said in error


def test_infinite_number_in_an_adapters_config_is_refused(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    mlx_lm_made(model, tmp_path / "theirs")
    path = tmp_path / "theirs" / "adapter_config.json"
    text = json.dumps(json.loads(path.read_text()) | {"mlxtune": {"alpha": float("inf")}})
    # 1e999 is valid JSON, but too large for a float.
    path.write_text(text.replace("Infinity", "1e999"))
    error = cli("import", tmp_path / "theirs", "--output", tmp_path / "ours").error
    assert "adapter_config.json" in error and "is not valid JSON" in error
    assert not (tmp_path / "ours").exists()


def test_pickled_adapter_is_not_read(cli: Cli, model: Path, tmp_path: Path) -> None:
    theirs = peft_folder(tmp_path / "theirs")
    (theirs / "adapter_model.safetensors").rename(theirs / "adapter_model.bin")
    error = cli("import", theirs, "--model-path", model, "--output", tmp_path / "ours").error
    assert "save_pretrained" in error


def test_folder_of_nothing_and_missing_path_are_errors(cli: Cli, tmp_path: Path) -> None:
    error = cli("import", tmp_path, "--output", tmp_path / "ours").error
    assert "holds neither" in error
    error = cli("import", "--output", tmp_path / "ours").error
    assert error == "name an adapter to import, such as their-peft-adapter"
