"""Adapters of a base quantised while loading: evaluation, use and export with the same base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune import ExportConfig, FuseConfig, TrainConfig, export, fuse, train
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import load_adapted
from mlxtune.backend.models.loading import load_base
from mlxtune.config.data_config import BaseOptions
from mlxtune.errors import ModelError
from tests.command import Cli
from tests.models import sums, write_adapter_config, write_chat, write_model
from tests.slow import long, slow, slow_except

TOKENS = [[5, 17, 80, 3, 44, 12]]
FORMATS = ["4", "8", "mxfp4", "nvfp4", "mxfp8", "nf4"]
# The entries that mlx_lm.convert writes to config.json.
CONVERTED = {
    "4": {"group_size": 64, "bits": 4, "mode": "affine"},
    "8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a model in bfloat16."""
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model", "qwen3", dtype="bfloat16", intermediate_size=128)
    write_chat(folder / "chat.jsonl", sums(20))
    return folder


@pytest.fixture(scope="module")
def trained(home: Path) -> dict[str, Path]:
    """The folders of the adapters trained so far, by format; tests add to them."""
    return {}


@pytest.fixture
def adapter(home: Path, trained: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    name = request.param
    if name not in trained:
        trained[name] = home / f"out-{name}"
        own: dict[str, Any] = {"quantize": name, "double_quant": name == "nf4"}
        train(
            TrainConfig(
                str(home / "model"),
                (str(home / "chat.jsonl"),),
                output=str(trained[name] / "adapters.safetensors"),
                targets=("all",),
                lr=1e-2,
                samples=0,
                quiet=True,
                dora=name in ("nf4", "mxfp4"),
                **own,
            )
        )
    return trained[name]


def logits(model: nn.Module) -> np.ndarray:
    return np.array(model(mx.array(TOKENS)).astype(mx.float32))


def trained_logits(home: Path, adapter: Path, **quantization: Any) -> np.ndarray:
    base = load_base(home / "model", "float32", BaseOptions(**quantization))
    return logits(load_adapted(base, AdapterFile.find(str(adapter))).model)


def how(name: str) -> dict[str, Any]:
    return {"quantize": name, "double_quant": name == "nf4"}


@pytest.mark.parametrize("adapter", slow_except(["4", "nf4"], "nf4"), indirect=True)
def test_adapter_is_judged_on_the_base_it_was_trained_on(
    cli: Cli, home: Path, adapter: Path
) -> None:
    ending = json.loads((adapter / "checkpoints" / "evaluation.json").read_text())
    name = adapter.name.removeprefix("out-")
    asked = ["--data", home / "chat.jsonl", "--adapter", adapter, "--model-path", home / "model"]
    outcome = cli("eval", *asked, "--json")
    assert outcome.code == 0, outcome.err
    assert f"quantised to {name}" in outcome.err
    assert "as in training" in outcome.err
    found = json.loads(outcome.out)
    double = ["--double-quant"] if name == "nf4" else []
    own = json.loads(cli("eval", *asked, "--json", "--quantize", name, *double).out)
    plain = cli("eval", *asked, "--json", "--quantize", "none")
    assert "a base other than the one that the adapter was trained on" in plain.err
    assert own == found
    assert json.loads(plain.out)["base"]["loss"] != pytest.approx(found["base"]["loss"], rel=1e-4)
    # The run's own verdict used the same base, on fewer rows.
    assert abs(ending["base"]["loss"] - found["base"]["loss"]) < 0.5


@pytest.mark.parametrize("adapter", ["nf4"], indirect=True)
def test_continuing_with_another_base_is_reported(
    cli: Cli, home: Path, adapter: Path, tmp_path: Path
) -> None:
    def said(start: Path | None, run: str, *quantize: str) -> str:
        asked = ["--model-path", home / "model", "--data", home / "chat.jsonl", "--samples", 0]
        asked += ["--quiet", "--max-steps", 1, "--val-split", 0, "--lr-min", 0]
        asked += ["--init-adapter", start] if start else []
        outcome = cli("train", *asked, *quantize, "--output", tmp_path / run / "a.safetensors")
        assert outcome.code == 0, outcome.err
        return outcome.err

    assert said(None, "plain") == ""
    (tmp_path / "plain/a.safetensors").rename(tmp_path / "plain/adapters.safetensors")
    assert said(adapter, "same", "--quantize", "nf4", "--double-quant") == ""
    assert said(adapter, "other").endswith(
        "was trained on the base quantised to nf4 with double quantisation: "
        "add --quantize nf4 --double-quant to use the same base\n"
    )
    assert said(tmp_path / "plain", "quantised", "--quantize", "8").endswith(
        "was trained on the base as stored: leave out --quantize to use the same base\n"
    )


@pytest.mark.parametrize("adapter", ["nf4"], indirect=True)
def test_answers_match_the_trained_model(cli: Cli, home: Path, adapter: Path) -> None:
    asked = ["--model-path", home / "model", "--prompt", "What is 3 + 21?", "--template", "qwen3"]
    outcome = cli("generate", *asked, "--adapter", adapter, "--max-new-tokens", "4")
    assert outcome.code == 0, outcome.err
    assert "quantised to nf4 with double quantisation, as in training" in outcome.err
    outcome = cli("generate", *asked, "--quantize", "8", "--max-new-tokens", "4")
    assert outcome.code == 0, outcome.err
    outcome = cli("generate", *asked, "--quantize", "8", "--double-quant")
    assert outcome.error.startswith("--double-quant goes with --quantize nf4")


@pytest.mark.parametrize(
    ("adapter", "dequantize"),
    [
        ("nf4", True),
        *(slow("4", False), slow("4", True), slow("nf4", False)),
        *(
            long(name, each)
            for name in FORMATS
            if name not in ("4", "nf4")
            for each in (False, True)
        ),
    ],
    indirect=["adapter"],
)
def test_fused_folder_matches_the_quantized_base(
    home: Path, adapter: Path, tmp_path: Path, dequantize: bool
) -> None:
    from mlx_lm.utils import load

    name, output = adapter.name.removeprefix("out-"), tmp_path / "fused"
    options = {"dequantize": dequantize, "force": not dequantize, "quiet": True}
    certificate = fuse(FuseConfig(str(adapter), str(output), **options)).certificate
    assert not certificate.problems
    plain = dequantize or name == "nf4"
    assert (certificate.tolerance is not None) == plain
    said = json.loads((output / "config.json").read_text())
    assert said.get("quantization") == (None if plain else CONVERTED[name])
    fused, _ = load(str(output))
    tensors = dict(tree_flatten(fused.parameters()))
    assert any(tensor.endswith(".scales") for tensor in tensors) != plain
    if plain:
        assert {tensor.dtype for tensor in tensors.values()} == {mx.bfloat16}
        trained = trained_logits(home, adapter, **how(name))
        found = logits(load_base(output, "float32").model)
        # The logits of the plain base with the adapter are over three times as far from the trained
        # model's logits.
        off = np.abs(trained_logits(home, adapter) - trained).mean()
        assert np.abs(found - trained).mean() < off / 3


@pytest.mark.parametrize("adapter", slow_except(["4", "mxfp4", "nf4"], "nf4"), indirect=True)
@pytest.mark.parametrize("format", [slow("mlx-lm"), "peft"])
def test_export_is_verified_on_the_quantized_base(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    from mlxtune.backend.models import loading

    bases = []

    def load(*args: Any, **kwargs: Any) -> Any:
        bases.append(load_base(*args, **kwargs))
        return bases[-1]

    monkeypatch.setattr(loading, "load_base", load)
    output = str(tmp_path / "exported")
    found = export(ExportConfig(adapter=str(adapter), output=output, format=format, quiet=True))
    assert not found.certificate.problems
    assert found.certificate.comparison.largest_difference < 1e-3
    # The first base is for the trained adapter, the second for the exported adapter.
    name = adapter.name.removeprefix("out-")
    assert [(base.quantize, base.double_quant) for base in bases] == [(name, name == "nf4")] * 2


@pytest.mark.parametrize("adapter", ["4"], indirect=True)
def test_folder_that_mlx_lm_converted_is_the_same_base(
    cli: Cli, home: Path, adapter: Path, tmp_path: Path
) -> None:
    from mlx_lm.convert import convert

    converted = tmp_path / "converted"
    convert(str(home / "model"), str(converted), quantize=True, q_group_size=64, q_bits=4)
    asked = ["--data", home / "chat.jsonl", "--adapter", adapter, "--json", "--model-path"]
    whole, again = (cli("eval", *asked, path) for path in (home / "model", converted))
    assert again.code == 0, again.err
    assert json.loads(again.out)["adapted"] == json.loads(whole.out)["adapted"]
    other = tmp_path / "other"
    convert(str(home / "model"), str(other), quantize=True, q_group_size=64, q_bits=8)
    assert "is quantised, but not to 4" in cli("eval", *asked, other).error
    with pytest.raises(ModelError, match="is quantised, but not to 4"):
        fuse(FuseConfig(adapter=str(adapter), output=str(tmp_path / "x"), model_path=str(other)))


@pytest.mark.parametrize("adapter", ["4"], indirect=True)
def test_adapter_of_an_unknown_format_is_an_error(
    cli: Cli, home: Path, adapter: Path, tmp_path: Path
) -> None:
    odd = Path(shutil.copytree(adapter, tmp_path / "odd"))
    config = json.loads((odd / "adapter_config.json").read_text())
    config["mlxtune"]["quantize"] = "q3"
    write_adapter_config(odd, config)
    asked = ["--model-path", home / "model", "--adapter", odd]
    assert (
        "'q3', which this version does not support"
        in cli("eval", *asked, "--data", home / "chat.jsonl").error
    )
