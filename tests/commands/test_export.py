"""`mlxtune fuse` and `mlxtune export` from the command line, and the files that they leave."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import safetensors.numpy
from mlx.utils import tree_flatten

from mlxtune import ExportConfig, FuseConfig, TrainConfig, export, fuse, train
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import load_adapted
from mlxtune.backend.models.loading import load_base
from mlxtune.core.data.problems import UNKNOWN_END
from mlxtune.core.data.template import built_in_jinja
from mlxtune.errors import OutputError
from mlxtune.session.reader import Reader
from mlxtune.session.verified_output import find_source
from tests.command import Cli, files_in
from tests.models import sums, write_chat, write_model

TOKENS = [[5, 17, 80, 3, 44, 12]]


def trained_on(model: Path, output: Path, **options: object) -> Path:
    rows = write_chat(output / "chat.jsonl", sums(20))
    adapter = output / "adapters.safetensors"
    settings = {"targets": ("all",), "lr": 1e-2, "alpha": 11.0, "samples": 0, "quiet": True}
    train(TrainConfig(str(model), (str(rows),), output=str(adapter), **settings | options))  # type: ignore[arg-type]
    return output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in float32, and the folder of an adapter that was trained on this model."""
    folder = tmp_path_factory.mktemp("trained")
    model = write_model(folder / "model", "llama")
    named = model / "additional_chat_templates" / "tool_use.jinja"
    named.parent.mkdir()
    named.write_text("Tools!")
    return model, trained_on(model, folder / "out", template="gemma")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in four bits, and the folder of an adapter that was trained on this model."""
    folder = tmp_path_factory.mktemp("quantised")
    model = write_model(
        folder / "model", "qwen3", num_hidden_layers=1, quantize=4, dtype="bfloat16"
    )
    return model, trained_on(model, folder / "out")


def logits(model: nn.Module) -> np.ndarray:
    return np.array(model(mx.array(TOKENS)).astype(mx.float32))


def trained_logits(model: Path, adapter: Path) -> np.ndarray:
    return logits(load_adapted(load_base(model, "float32"), AdapterFile.find(str(adapter))).model)


def test_proof_has_the_prompts_that_training_renders(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_prompt() -> bytes:
        source = find_source(FuseConfig(str(trained[1]), output="unused", quiet=True))
        return b"".join(source.reader.tokenizer.token_bytes(source.prompts[0]))

    assert b"<start_of_turn>user\nTell me a short story" in first_prompt()
    # Any template will do for a model whose own template refuses the prompt.
    monkeypatch.setattr(Reader, "renders_prompts", False)
    assert b"<|im_start|>user\nTell me a short story" in first_prompt()


# Fuse


def test_mlx_lm_loads_the_fused_folder_as_a_model(
    cli: Cli, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    from mlx_lm.utils import load

    model, adapter = trained
    outcome = cli("fuse", "--adapter", adapter, "--output", tmp_path / "fused")
    assert outcome.code == 0, outcome.err
    assert "14 tensors fused" in outcome.out
    # The template of training replaces the base model's.
    written = {path.read_text() for path in (tmp_path / "fused").rglob("*.jinja")}
    assert written == {built_in_jinja("gemma")}
    fused, tokenizer = load(str(tmp_path / "fused"))
    # The template's turns end with a different token from the base model's turns.
    ends = map(tokenizer.convert_ids_to_tokens, sorted(tokenizer.eos_token_ids))
    assert list(ends) == ["<|im_end|>", "<end_of_turn>"]
    np.testing.assert_allclose(logits(fused), trained_logits(model, adapter), rtol=0, atol=1e-5)
    plain = logits(load_base(model, "float32").model)
    assert np.abs(plain - trained_logits(model, adapter)).max() > 0.01
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "fused" / name).read_bytes() == (model / name).read_bytes()
    certificate = json.loads((tmp_path / "fused" / "certificate.json").read_text())
    assert certificate["passed"]
    assert certificate["tolerance"] < 1e-4
    assert set(certificate["files"]) == {*files_in(tmp_path / "fused")} - {"certificate.json"}


def test_fused_weights_keep_the_dtype_and_are_rounded_once(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama", dtype="bfloat16")
    adapter = trained_on(model, tmp_path / "out")
    fuse(FuseConfig(adapter=str(adapter), output=str(tmp_path / "fused"), quiet=True))
    before, after = (
        mx.load(str(folder / "model.safetensors")) for folder in (model, tmp_path / "fused")
    )
    low_rank = safetensors.numpy.load_file(adapter / "adapters.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        a = low_rank.get(name.replace(".weight", ".lora_a"))
        if a is None:
            assert mx.array_equal(after[name], weight)
            continue
        b = low_rank[name.replace(".weight", ".lora_b")]
        wanted = np.array(weight.astype(mx.float32)) + 11 / 8 * (a.astype(float) @ b).T
        assert after[name].dtype == mx.bfloat16
        off = np.abs(np.array(after[name].astype(mx.float32)) - wanted)
        assert (off <= 2**-8 * np.abs(wanted) * 1.001 + 1e-12).all()


@pytest.mark.slow
def test_cost_of_fusing_into_quantized_weights_is_reported(
    quantized: tuple[Path, Path], tmp_path: Path
) -> None:
    from mlx_lm.utils import load

    _, adapter = quantized
    output = tmp_path / "fused"
    found = fuse(FuseConfig(adapter=str(adapter), output=str(output), quiet=True)).certificate
    assert not found.problems
    assert found.tolerance is None
    assert found.comparison.mean_kl > 1e-6
    assert any("quantising the weights again" in line for line in found.lines())
    assert json.loads((output / "config.json").read_text())["quantization"]["bits"] == 4
    fused, _ = load(str(output))
    assert "model.layers.0.self_attn.q_proj.scales" in dict(tree_flatten(fused.parameters()))


def test_dequantized_weights_are_plain_and_near_what_was_trained(
    quantized: tuple[Path, Path], tmp_path: Path
) -> None:
    model, adapter = quantized
    output = tmp_path / "fused"
    config = FuseConfig(adapter=str(adapter), output=str(output), dequantize=True, quiet=True)
    assert fuse(config).certificate.tolerance is not None
    assert "quantization" not in json.loads((output / "config.json").read_text())
    names = mx.load(str(output / "model.safetensors"))
    assert not [name for name in names if name.endswith(".scales")]
    fused = logits(load_base(output, "float32").model)
    np.testing.assert_allclose(fused, trained_logits(model, adapter), rtol=0, atol=0.2)


@pytest.mark.parametrize("spoilt", ["fused", "other"])
def test_wrong_fused_weight_leaves_no_output(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    from mlxtune.backend.adapters import fusing

    name = "mlp.up_proj.weight" if spoilt == "fused" else "embed_tokens.weight"
    save = fusing._save

    def save_something_else(path: Path, tensors: dict[str, mx.array]) -> None:
        save(path, {k: v * (1.001 if k.endswith(name) else 1) for k, v in tensors.items()})

    monkeypatch.setattr(fusing, "_save", save_something_else)
    with pytest.raises(OutputError, match=rf"differs from what was trained.*{name}"):
        fuse(FuseConfig(adapter=str(trained[1]), output=str(tmp_path / "fused"), quiet=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_fusing_holds_a_file_of_weights_at_a_time(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are released as they are written, in files of a bounded size."""
    from mlxtune.backend.adapters import fusing
    from mlxtune.backend.adapters.file_formats.mlx_lm import read_mlx_lm

    model_folder = write_model(tmp_path / "large", "llama", num_hidden_layers=12)
    adapter = read_mlx_lm(
        AdapterFile(trained_on(model_folder, tmp_path / "out") / "adapters.safetensors")
    )
    monkeypatch.setattr(
        fusing, "make_shards", lambda weights, **_: [dict([w]) for w in weights.items()]
    )
    model, config = fusing.fused_model(fusing.Fusion(model_folder, adapter), dequantize=False)
    size = (model_folder / "model.safetensors").stat().st_size
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    (tmp_path / "fused").mkdir()
    fusing.write_model(model, config, model_folder, tmp_path / "fused", text_only=False)
    assert mx.get_peak_memory() - start < size / 2
    assert len(list((tmp_path / "fused").glob("model-*.safetensors"))) > 100


@pytest.mark.parametrize("beside", ["pipe", "device"])
def test_reading_a_device_instead_of_an_adapter_ends(
    trained: tuple[Path, Path], tmp_path: Path, beside: str
) -> None:
    from mlxtune.session.verified_output import find_source

    shutil.copyfile(trained[1] / "adapters.safetensors", tmp_path / "adapters.safetensors")
    shutil.copyfile(trained[1] / "adapter_config.json", tmp_path / "adapter_config.json")
    checkpoint = tmp_path / "checkpoints" / "best"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    if beside == "pipe":
        os.mkfifo(checkpoint / "adapters.safetensors")
    else:
        (checkpoint / "adapters.safetensors").symlink_to("/dev/zero")
    config = FuseConfig(str(tmp_path), str(tmp_path / "out"), str(trained[0]))
    assert find_source(config).file.origin.metadata == {}


# Export


@pytest.mark.parametrize("format", ["mlx-lm", "peft", "flat"])
def test_export_is_verified_by_loading_it(
    cli: Cli, trained: tuple[Path, Path], tmp_path: Path, format: str
) -> None:
    outcome = cli("export", "--format", format, "--adapter", trained[1], "--output", tmp_path / "o")
    assert outcome.code == 0, outcome.err
    certificate = json.loads((tmp_path / "o" / "certificate.json").read_text())
    assert certificate["passed"]
    assert certificate["largest_difference"] < 1e-5 < certificate["adapter_effect"]
    assert certificate["greedy_match"] == {"same": 16, "of": 16}


def test_flat_file_has_the_names_and_shapes_of_the_original(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    _, adapter = trained
    config = ExportConfig(
        adapter=str(adapter), output=str(tmp_path / "o"), format="flat", quiet=True
    )
    path = export(config).output / "adapter.safetensors"
    tensors = safetensors.numpy.load_file(path)
    ours = safetensors.numpy.load_file(adapter / "adapters.safetensors")
    assert len(tensors) == len(ours) == 28
    for layer in range(2):
        for projection, inside in [("q_proj", "self_attn"), ("down_proj", "mlp")]:
            for part in ("lora_a", "lora_b"):
                expected = ours[f"model.layers.{layer}.{inside}.{projection}.{part}"].T
                found = tensors[f"lora.{layer}.{projection}.{part}"]
                assert found.dtype == np.float32
                np.testing.assert_array_equal(found, expected)
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    best = json.loads((adapter / "checkpoints" / "best" / "metadata.json").read_text())
    assert int(metadata["epoch"]) == best["epoch"] == 1
    assert float(metadata["val_loss"]) == best["val_loss"]


@pytest.mark.parametrize("format", ["peft", "flat"])
def test_wrong_export_is_detected_and_removed(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    from mlxtune.backend.adapters.file_formats import flat, peft

    room = peft if format == "peft" else flat
    write = room.write_tensors

    def write_something_else(path: Path, tensors: dict[str, np.ndarray], said: object) -> None:
        write(path, {k: v * np.float32(1.01) for k, v in tensors.items()}, said)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "write_tensors", write_something_else)
    config = ExportConfig(
        adapter=str(trained[1]), output=str(tmp_path / "o"), format=format, quiet=True
    )
    with pytest.raises(OutputError, match="its logits differ by up to"):
        export(config)
    assert list(tmp_path.iterdir()) == []


def test_mlx_lms_own_commands_take_the_export(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapter = trained
    output = tmp_path / "o"
    config = ExportConfig(adapter=str(adapter), output=str(output), format="mlx-lm", quiet=True)
    export(config)
    assert (output / "adapters.safetensors").read_bytes() == (
        adapter / "adapters.safetensors"
    ).read_bytes()
    shared = ["--model", model, "--adapter-path", output]
    for command, options in {
        "generate": ["--prompt", "What is 1 + 7?", "--max-tokens", 4],
        "fuse": ["--save-path", tmp_path / "fused"],
    }.items():
        monkeypatch.setattr(sys, "argv", [command, *map(str, (*shared, *options))])
        import_module(f"mlx_lm.{command}").main()
    fused = logits(load_base(tmp_path / "fused", "float32").model)
    np.testing.assert_allclose(fused, trained_logits(model, adapter), rtol=0, atol=1e-5)


def test_json_is_the_certificate_and_alone_on_stdout(
    cli: Cli, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    arguments = ["--adapter", trained[1], "--output", tmp_path / "o", "--json", "--quiet"]
    outcome = cli("export", "--format", "peft", *arguments)
    # Training's template ends turns with a token that the model does not know as an end.
    (warning,) = outcome.err.splitlines()
    assert warning.startswith(f"warning: {UNKNOWN_END} (<end_of_turn>: ")
    assert json.loads(outcome.out) == json.loads((tmp_path / "o" / "certificate.json").read_text())


def test_problems_are_one_line_that_names_them(
    cli: Cli, trained: tuple[Path, Path], quantized: tuple[Path, Path], tmp_path: Path
) -> None:
    model, adapter = trained
    good = ["--adapter", adapter, "--output", tmp_path / "o"]
    assert "--format is required" in cli("export", *good).error.replace(
        "--format is empty", "--format is required"
    )
    assert "which is an input" in cli("fuse", "--adapter", adapter, "--output", model).error
    assert (
        "which is an input"
        in cli("export", "--format", "peft", "--adapter", adapter, "--output", adapter).error
    )
    assert (
        "no such file or folder"
        in cli("fuse", "--adapter", tmp_path / "none", "--output", tmp_path / "o").error
    )
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "thesis.txt").touch()
    replaced = cli("fuse", *good, "--overwrite", "--quiet")
    assert "already holds other files" in replaced.error
    elsewhere = ["--adapter", adapter, "--output", tmp_path / "p", "--quiet"]
    other = write_model(tmp_path / "wide", "llama", hidden_size=32)
    named = [*elsewhere, "--model-path", other]
    assert "was trained on another base model" in cli("fuse", *named).error
    assert "the adapter is for" in cli("fuse", *named, "--other-base").error
    assert files_in(tmp_path / "o") == ["thesis.txt"]
    assert not (tmp_path / "p").exists()
