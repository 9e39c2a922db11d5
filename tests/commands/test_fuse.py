"""`mlxtune fuse` on a quantised base keeps the adapter's gain."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import mlx.core as mx
import pytest
from mlx_lm.utils import load

from mlxtune import EvalConfig, FuseConfig, TrainConfig, evaluate, fuse, train
from mlxtune.backend.device.default_device import on_cpu
from mlxtune.core.files.remembered import MARK
from mlxtune.session import reader
from tests.command import Cli
from tests.models import SHAPE, sums, write_chat, write_model
from tests.paths import SHARED
from tests.slow import slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a 4-bit base, with updates smaller than a step of the 4-bit format."""
    folder = tmp_path_factory.mktemp("run")
    write_model(folder / "model", "qwen3", num_hidden_layers=1, quantize=4, dtype="bfloat16")
    write_chat(folder / "chat.jsonl", sums(40))
    train(
        TrainConfig(
            str(folder / "model"),
            (str(folder / "chat.jsonl"),),
            output=str(folder / "out" / "adapters.safetensors"),
            targets=("all",),
            lr=3e-3,
            epochs=1,
            val_split=0.25,
            samples=0,
            quiet=True,
        )
    )
    return folder


def certificate_of(folder: Path) -> Any:
    return json.loads((folder / "certificate.json").read_text())


def loss(model: Path, data: Path, adapter: Path | None = None) -> float:
    named = None if adapter is None else str(adapter)
    found = evaluate(EvalConfig(str(model), data=(str(data),), adapter=named, quiet=True))
    return (found.adapted or found.base).loss


def test_projections_get_more_bits_where_four_lose_the_gain(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    outcome = cli("fuse", "--adapter", run / "out", "--output", tmp_path / "fused")
    assert outcome.code == 0, outcome.err
    lost = "with the trained projections stored as the base, the adapter loses"
    assert f"warning: {lost}" in outcome.err
    assert "they are stored in 6 bits" in outcome.err
    found = certificate_of(tmp_path / "fused")["retention"]
    assert found["measure"] == "Loss on 10 validation rows"
    nearest, by_gptq, last = found["tried"]
    assert nearest["lost"] > 0.5 > by_gptq["lost"] > 0.03 >= last["lost"]
    assert [found["bits"], found["method"]] == [6, "nearest"]
    quantization = json.loads((tmp_path / "fused/config.json").read_text())["quantization"]
    assert quantization["bits"] == 4
    assert quantization["model.layers.0.mlp.up_proj"]["bits"] == 6
    assert "model.embed_tokens" not in quantization
    # The run's records and the fused folder itself have the measured losses.
    result = json.loads((run / "out/checkpoints/result.json").read_text())
    # On a GPU, training uses a different form of the products, in 16 bits.
    tolerance = 1e-4 if on_cpu() else 0.05
    assert found["base"] == pytest.approx(result["initial_val_loss"], abs=tolerance)
    assert found["trained"] == pytest.approx(result["best_val_loss"], abs=tolerance)
    model, _ = load(str(tmp_path / "fused"))
    assert model.model.layers[0].mlp.up_proj.bits == 6
    assert model.model.embed_tokens.bits == 4


def test_force_stores_as_the_base_and_reports_the_loss(cli: Cli, run: Path, tmp_path: Path) -> None:
    outcome = cli("fuse", "--adapter", run / "out", "--output", tmp_path / "fused", "--force")
    assert outcome.code == 0, outcome.err
    assert "it is worth more on its own, or with --dequantize" in outcome.err
    (only,) = certificate_of(tmp_path / "fused")["retention"]["tried"]
    assert only["storage"] == "as the base"
    assert only["lost"] > 0.1
    quantization = json.loads((tmp_path / "fused/config.json").read_text())["quantization"]
    assert quantization == json.loads((run / "model/config.json").read_text())["quantization"]


@pytest.mark.parametrize("options", [slow({"force": True}), {"bits": 5}])
def test_measured_loss_is_that_of_the_folder_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    config = FuseConfig(str(run / "out"), str(tmp_path / "fused"), quiet=True, **options)
    opened, real = [], reader.load_tokenizer
    monkeypatch.setattr(reader, "load_tokenizer", lambda *a, **k: opened.append(a) or real(*a, **k))
    found = fuse(config).certificate.retention
    # The rows, the proof and the written template need it.
    assert len(opened) == 1
    assert found is not None
    assert found.selected.method == ("nearest" if "force" in options else "gptq")
    rows = (run / "chat.jsonl").read_text().splitlines()
    held_out = [rows[i] for i in held_out_rows(run)]
    data = tmp_path / "held_out.jsonl"
    data.write_text("\n".join(held_out) + "\n")
    assert found.base == pytest.approx(loss(run / "model", data), rel=1e-5)
    assert found.trained == pytest.approx(loss(run / "model", data, run / "out"), rel=1e-5)
    assert found.selected.value == pytest.approx(loss(tmp_path / "fused", data), rel=1e-5)


@pytest.mark.slow
def test_imported_adapter_is_rounded_by_gptq_on_rows_that_are_named(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "imported"
    adapter.mkdir()
    for name in ("adapters.safetensors", "adapter_config.json"):
        shutil.copy(run / "out" / name, adapter)
    options = ["--adapter", adapter, "--bits", 5]
    without = cli("fuse", *options, "--output", tmp_path / "without")
    assert without.code == 0, without.err
    assert "not tried, without the rows of training: name them, or rows like them" in without.err
    assert certificate_of(tmp_path / "without")["retention"]["method"] == "nearest"

    named = ["--data", run / "chat.jsonl", "--output", tmp_path / "named"]
    outcome = cli("fuse", *options, *named)
    assert outcome.code == 0, outcome.err
    assert re.search(
        r"rounding on [0-9,]+ tokens of 32 examples, in up to .* of memory", outcome.err
    )
    found = certificate_of(tmp_path / "named")["retention"]
    assert found["measure"] == "Loss on 8 validation rows"
    assert [found["bits"], found["method"]] == [5, "gptq"]
    assert found["kept"] > 0.97


@pytest.mark.slow
def test_mode_without_gptq_gets_more_bits(cli: Cli, run: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3", dtype="bfloat16", intermediate_size=128)
    trained = ["--model-path", tmp_path / "model", "--quantize", "mxfp4", "--lr", 3e-3]
    trained += ["--data", run / "chat.jsonl", "--output", tmp_path / "out", "--samples", 0]
    assert cli("train", *trained, "--targets", "all", "--epochs", 1).code == 0
    outcome = cli("fuse", "--adapter", tmp_path / "out", "--output", tmp_path / "fused")
    assert "not tried, as it is for the affine mode: more bits remain" in outcome.err
    assert certificate_of(tmp_path / "fused")["retention"]["bits"] == 6


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--bits", 3], "--bits must be at least the base's 4, not 3"),
        (["--bits", 7], "--bits 7 is not a format of MLX: set 6 or 8"),
        (["--bits", 6, "--dequantize"], "--bits is for quantised weights: leave out --dequantize"),
    ],
)
def test_impossible_bits_are_an_error(
    cli: Cli, run: Path, tmp_path: Path, options: list[Any], problem: str
) -> None:
    output = tmp_path / "fused"
    error = cli("fuse", "--adapter", run / "out", "--output", output, *options).error
    assert problem in error
    assert not output.exists()


def held_out_rows(run: Path) -> list[int]:
    from mlxtune.core.data.held_out import hold_out_rows

    # All rows differ.
    about = json.loads((run / "out/checkpoints/run.json").read_text())["config"]
    return hold_out_rows(range(40), about["val_split"], about["seed"], about["val_rows"])[1]


@pytest.mark.parametrize("missing", ["data", slow("mark")])
def test_without_rows_of_an_own_run_the_divergence_on_prompts_decides(
    run: Path, tmp_path: Path, missing: str
) -> None:
    """A stranger's run must not choose which files are read."""
    copy = tmp_path / "run"
    if missing == "mark":
        shutil.copytree(run / "out", copy)
        (copy / "checkpoints" / MARK).write_text("0" * 32 + "\n")
    else:
        copy = run / "out"
        (run / "chat.jsonl").rename(tmp_path / "elsewhere.jsonl")
    try:
        config = FuseConfig(
            str(copy), str(tmp_path / "fused"), str(run / "model"), force=True, quiet=True
        )
        found = fuse(config).certificate.retention
    finally:
        if missing == "data":
            (tmp_path / "elsewhere.jsonl").rename(run / "chat.jsonl")
    assert found is not None
    assert found.measure == "KL on 2 prompts"
    assert found.trained == 0
    assert found.base > 0


@pytest.mark.slow
def test_plain_base_is_not_measured(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    rows = write_chat(tmp_path / "chat.jsonl", sums(8))
    output = tmp_path / "out" / "adapters.safetensors"
    train(TrainConfig(str(model), (str(rows),), output=str(output), max_steps=1, quiet=True))
    certificate = fuse(FuseConfig(str(output), str(tmp_path / "fused"), quiet=True)).certificate
    assert certificate.retention is None
    assert "retention" not in certificate.as_dict()


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs {SHARED}")
@pytest.mark.long
def test_real_model_of_four_bits_keeps_what_it_learned(tmp_path: Path) -> None:
    """A model of stories was taught arithmetic; rounding to nearest undoes a tenth of the gain."""
    from mlx_lm import convert

    base = tmp_path / "base"
    convert(str(SHARED / "models/stories260k"), str(base), quantize=True, q_bits=4, q_group_size=32)
    answers = (SHARED / "chat/gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()[:120]
    texts = [json.loads(line)["messages"][-1]["content"] for line in answers]
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    output = tmp_path / "out" / "adapters.safetensors"
    train(
        TrainConfig(
            str(base),
            (str(data),),
            output=str(output),
            targets=("q_proj", "k_proj", "v_proj", "o_proj"),
            lr=1e-3,
            epochs=1,
            val_split=0.3,
            samples=0,
            quiet=True,
        )
    )
    found = fuse(FuseConfig(str(output), str(tmp_path / "fused"), quiet=True)).certificate
    assert found.retention is not None
    assert found.retention.tried[0].lost > 0.1 > 0.02 > found.retention.selected.lost
    assert found.retention.selected.bits == 4
    mx.clear_cache()


# Models with images

TOWER = {
    "vision_tower.layers.0.self_attn.q_proj.weight": (8, 8),
    "multi_modal_projector.linear.weight": (8, 4),
}


def with_images(folder: Path, stored_as: str) -> tuple[Path, Path]:
    """Write a model with parts for images, stored under a prefix, and train on it for a step."""
    text = {"model_type": "llama", "tie_word_embeddings": False, **SHAPE}
    model = write_model(folder / "model", "mistral3", text_config=text, vision_config={"depth": 1})
    file = str(model / "model.safetensors")
    weights = mx.load(file)
    assert isinstance(weights, dict)
    named = {
        name.replace("language_model.model.", stored_as): value for name, value in weights.items()
    }
    images = {name: mx.random.normal(shape) for name, shape in TOWER.items()}
    mx.save_safetensors(file, {**named, **images}, metadata={"format": "mlx"})
    output = folder / "out" / "adapters.safetensors"
    data = write_chat(folder / "chat.jsonl", sums(8))
    train(TrainConfig(str(model), (str(data),), output=str(output), max_steps=1, samples=0))
    return model, output


def test_weights_for_images_are_kept_to_the_bit(tmp_path: Path, cli: Cli) -> None:
    model, adapter = with_images(tmp_path, "language_model.model.")
    merged = cli(
        "export", "--format", "gguf", "--merge", "--adapter", adapter, "--output", tmp_path / "m"
    )
    assert "left out 2 tensors for images or sound: the written model" in merged.err
    fused = fuse(adapter=str(adapter), output=str(tmp_path / "fused"), quiet=True).output

    before, after = (mx.load(str(each / "model.safetensors")) for each in (model, fused))
    assert isinstance(before, dict) and isinstance(after, dict)
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in TOWER)
    config = json.loads((fused / "config.json").read_text())
    assert config["vision_config"] == {"depth": 1}


@pytest.mark.slow
def test_image_weights_that_no_longer_fit_leave_config_too(cli: Cli, tmp_path: Path) -> None:
    _, adapter = with_images(tmp_path, "model.language_model.")
    outcome = cli("fuse", "--adapter", adapter, "--output", tmp_path / "fused")

    assert outcome.code == 0, outcome.err
    assert "warning: left out 2 tensors for images or sound" in outcome.err
    written = mx.load(str(tmp_path / "fused" / "model.safetensors"))
    assert isinstance(written, dict) and written.keys().isdisjoint(TOWER)
    config = json.loads((tmp_path / "fused" / "config.json").read_text())
    assert "vision_config" not in config and config["model_type"] == "mistral3"
    load(str(tmp_path / "fused"))
