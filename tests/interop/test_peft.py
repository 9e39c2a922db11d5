"""Exported adapters and fused folders in transformers and PEFT, and imported PEFT adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

torch = pytest.importorskip("torch", reason="needs torch, which runs transformers' models")
peft = pytest.importorskip("peft", reason="needs peft, which loads what is exported")

from transformers import AutoModelForCausalLM  # noqa: E402

from mlxtune import ExportConfig, FuseConfig, ImportConfig, export, fuse, import_adapter  # noqa: E402
from mlxtune.backend.adapters.adapter_file import AdapterFile  # noqa: E402
from tests.interop.hf import (  # noqa: E402
    TOKENS,
    torch_logits,
    train_on,
    trained_logits,
    write_hf_model,
    write_split_experts,
)

KINDS = ("qwen3", "llama", "gemma3", "qwen2", "gemma2")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("short_checks"),
]
Trained = tuple[Path, Path]


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_hf_model(folder / "model", request.param)
    return model, train_on(model, folder / "out")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_model(tmp_path_factory.mktemp("llama") / "model", "llama")


def base_of(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )


def exported(model: Path, adapter: Path, output: Path) -> Path:
    config = ExportConfig(
        adapter=str(adapter), output=str(output), model_path=str(model), format="peft", quiet=True
    )
    result = export(config)
    assert not result.certificate.problems
    assert result.certificate.effect > 0.1
    return result.output


def test_exported_adapter_gives_the_trained_models_logits_in_peft(
    trained: Trained, tmp_path: Path
) -> None:
    model, adapter = trained
    output = exported(model, adapter, tmp_path / "peft")
    expected = trained_logits(model, adapter)
    base = base_of(model)
    plain = torch_logits(base)
    with_peft = peft.PeftModel.from_pretrained(base, output)
    np.testing.assert_allclose(torch_logits(with_peft), expected, rtol=0, atol=1e-4)
    assert np.abs(plain - expected).max() > 0.1
    # The file has all of PEFT's LoRA parameters.
    assert {name for name, _ in with_peft.named_parameters() if "lora_" in name} == {
        name.replace(".weight", ".default.weight")
        for name in safetensors.numpy.load_file(output / "adapter_model.safetensors")
    }


@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral", "olmoe", "qwen3_moe"])
# PEFT warns because it checks these patterns against modules only, but applies them to parameters
# too.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")
def test_experts_give_the_trained_models_logits_in_peft_and_back(tmp_path: Path, kind: str) -> None:
    theirs = write_hf_model(tmp_path / "theirs", kind)
    model = write_split_experts(theirs, tmp_path / "model") if kind == "gpt_oss" else theirs
    ranks = ("up_proj=2", "o_proj=3")
    adapter = train_on(model, tmp_path / "out", target_rank=ranks, template="qwen3")
    output = exported(model, adapter, tmp_path / "peft")
    expected = trained_logits(model, adapter)
    base = base_of(theirs)
    plain = torch_logits(base)
    with_peft = peft.PeftModel.from_pretrained(base, output)
    np.testing.assert_allclose(torch_logits(with_peft), expected, rtol=0, atol=1e-4)
    assert np.abs(plain - expected).max() > 0.1
    assert {name for name, _ in with_peft.named_parameters() if "lora_" in name} == {
        name.replace(".weight", ".default.weight")
        for name in safetensors.numpy.load_file(output / "adapter_model.safetensors")
    }
    back = imported(output, model, tmp_path / "back")
    np.testing.assert_allclose(trained_logits(model, back), expected, rtol=0, atol=1e-5)


def test_fused_folder_gives_the_trained_models_logits_in_transformers(
    trained: Trained, tmp_path: Path
) -> None:
    model, adapter = trained
    output = tmp_path / "fused"
    result = fuse(FuseConfig(adapter=str(adapter), output=str(output), quiet=True))
    assert not result.certificate.problems
    fused = torch_logits(base_of(output))
    np.testing.assert_allclose(fused, trained_logits(model, adapter), rtol=0, atol=1e-4)


FAMILY: dict[str, dict[str, Any]] = {
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
    "ranks": {"rslora": True, "target_rank": ("q_proj=2", "down_proj=6")},
}


@pytest.mark.parametrize("kind", FAMILY)
def test_lora_of_each_kind_leaves_as_it_was_trained(llama: Path, tmp_path: Path, kind: str) -> None:
    adapter = train_on(llama, tmp_path / "out", **FAMILY[kind])
    expected = trained_logits(llama, adapter)
    with_peft = peft.PeftModel.from_pretrained(
        base_of(llama), exported(llama, adapter, tmp_path / "peft")
    )
    np.testing.assert_allclose(torch_logits(with_peft), expected, rtol=0, atol=1e-4)
    fuse(FuseConfig(adapter=str(adapter), output=str(tmp_path / "fused"), quiet=True))
    fused = torch_logits(base_of(tmp_path / "fused"))
    np.testing.assert_allclose(fused, expected, rtol=0, atol=1e-4)


def test_adapter_of_the_last_layers_has_no_others_in_peft(llama: Path, tmp_path: Path) -> None:
    adapter = train_on(llama, tmp_path / "out", num_layers=2, targets=("q_proj", "down_proj"))
    output = exported(llama, adapter, tmp_path / "peft")
    config = json.loads((output / "adapter_config.json").read_text())
    assert config["layers_to_transform"] == [1, 2]
    assert config["target_modules"] == ["down_proj", "q_proj"]
    with_peft = peft.PeftModel.from_pretrained(base_of(llama), output)
    layers = {name.split(".")[4] for name, _ in with_peft.named_parameters() if "lora_A" in name}
    assert layers == {"1", "2"}
    np.testing.assert_allclose(
        torch_logits(with_peft), trained_logits(llama, adapter), rtol=0, atol=1e-4
    )


def imported(path: Path, model: Path, output: Path) -> Path:
    config = ImportConfig(adapter=str(path), output=str(output), model_path=str(model))
    return import_adapter(config).parent


def data_of(weights: Path) -> bytes:
    """Return a safetensors file's bytes after the header, which depends on the config."""
    content = weights.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def test_exported_and_imported_again_is_the_same_to_the_bit(
    trained: Trained, tmp_path: Path
) -> None:
    model, adapter = trained
    back = imported(exported(model, adapter, tmp_path / "peft"), model, tmp_path / "back")
    tensors, same = (data_of(folder / "adapters.safetensors") for folder in (back, adapter))
    assert tensors == same
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (adapter, back)
    )
    # PEFT's config cannot contain mlxtune's own options.
    assert {name: said for name, said in ours.items() if name != "mlxtune"} == theirs


def peft_made(model: Path, output: Path, **config: Any) -> tuple[Path, np.ndarray[Any, Any]]:
    """Make PEFT write an adapter with random tensors; return the adapter's folder and logits."""
    settings = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
    wrapped = peft.get_peft_model(base_of(model), peft.LoraConfig(**settings | config))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(std=0.2)
            if "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape))
    wrapped.save_pretrained(output)
    return output, torch_logits(wrapped)


ADAPTERS = {
    "list": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "regex": {"target_modules": r".*\.(self_attn|mlp)\.(o|gate)_proj"},
    "rslora": {"use_rslora": True},
    "layers": {"layers_to_transform": [0, 2], "target_modules": ["k_proj", "up_proj"]},
    "first layer": {"layers_to_transform": [0]},
    "ranks": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 8},
        "alpha_pattern": {"v_proj": 12},
    },
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_of_peft_is_imported_and_exported_to_the_same_tensors(
    llama: Path, tmp_path: Path, kind: str
) -> None:
    made, expected = peft_made(llama, tmp_path / "made", **ADAPTERS[kind])
    adapter = imported(made, llama, tmp_path / "ours")
    np.testing.assert_allclose(trained_logits(llama, adapter), expected, rtol=0, atol=1e-4)
    output = exported(llama, adapter, tmp_path / "peft")
    before, after = (
        safetensors.numpy.load_file(folder / "adapter_model.safetensors")
        for folder in (made, output)
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor)
    with_peft = peft.PeftModel.from_pretrained(base_of(llama), output)
    np.testing.assert_allclose(torch_logits(with_peft), expected, rtol=0, atol=1e-5)


def test_scales_that_differ_are_taken_up_by_b(llama: Path, tmp_path: Path) -> None:
    config = {"target_modules": ["q_proj", "k_proj", "v_proj"], "alpha_pattern": {"v_proj": 11}}
    made, expected = peft_made(llama, tmp_path / "made", **config)
    adapter = imported(made, llama, tmp_path / "ours")
    np.testing.assert_allclose(trained_logits(llama, adapter), expected, rtol=0, atol=1e-4)


def test_dora_is_pefts_in_mlx_lm_in_its_fused_weights_and_back(llama: Path, tmp_path: Path) -> None:
    import mlx.core as mx

    from mlxtune.backend.adapters import fusing
    from mlxtune.backend.adapters.file_formats import mlx_lm
    from mlxtune.backend.adapters.file_formats import peft as ours
    from mlxtune.backend.adapters.file_formats.mlx_lm import read_mlx_lm
    from mlxtune.backend.models.loading import load_base

    made, expected = peft_made(
        llama, tmp_path / "made", use_dora=True, target_modules=["q_proj", "down_proj"]
    )
    folder = imported(made, llama, tmp_path / "ours")
    loaded = mlx_lm.load_with_mlx_lm(load_base(llama, "float32").model, folder)
    found = np.array(loaded(mx.array(TOKENS)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    adapter = read_mlx_lm(AdapterFile(folder / "adapters.safetensors"))
    fused, _ = fusing.fused_model(fusing.Fusion(llama, adapter), dequantize=False)
    np.testing.assert_allclose(np.array(fused(mx.array(TOKENS))), expected, rtol=0, atol=1e-4)
    (tmp_path / "peft").mkdir()
    ours.write_peft(adapter, llama, tmp_path / "peft")
    before, after = (
        safetensors.numpy.load_file(each / "adapter_model.safetensors")
        for each in (made, tmp_path / "peft")
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor)
    with_peft = peft.PeftModel.from_pretrained(base_of(llama), tmp_path / "peft")
    np.testing.assert_allclose(torch_logits(with_peft), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_feature_unsupported_by_mlx_lms_lora_is_named(
    llama: Path, tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    from mlxtune import ModelError

    made, _ = peft_made(llama, tmp_path / "made", **config)
    with pytest.raises(ModelError, match=named):
        imported(made, llama, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
