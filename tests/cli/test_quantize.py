"""`--quantize`: every format, equal bytes, resumed runs and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtune import TrainConfig, resume
from mlxtune.backend.models import loading, stored_layers
from mlxtune.backend.models.stored_layers import TimedMatmuls
from mlxtune.config import BenchConfig
from mlxtune.core.files.reading import file_hash
from mlxtune.core.formatting import format_name
from mlxtune.errors import ConfigError, ModelError
from tests.command import Cli
from tests.models import write_model
from tests.session.test_resuming import stop_after
from tests.slow import slow

STEPS = ("--max-steps", "4", "--targets", "all", "--lr", "1e-2")


@pytest.mark.parametrize("name", [slow("4"), slow("mxfp8"), "nf4"])
def test_each_format_trains_and_is_reported(train: Cli, output: Path, name: str) -> None:
    done = train(*STEPS, "--quantize", name, quiet=False)
    assert done.code == 0, done.err
    assert "quantised while loading" in done.err
    assert f"quantised to {format_name(name)} while loading" in done.err
    said = json.loads(output.with_name("adapter_config.json").read_text())["mlxtune"]
    assert (said["quantize"], said["double_quant"]) == (name, False)


def test_adapter_omits_the_base_if_it_matches_the_folder(train: Cli, output: Path) -> None:
    done = train(*STEPS, quiet=False)
    assert "while loading" not in done.err
    config = json.loads(output.with_name("adapter_config.json").read_text())
    assert "quantize" not in config.get("mlxtune", {})


def test_resumed_run_writes_the_same_bytes(train: Cli, output: Path) -> None:
    options = ("--epochs", "2", "--lr", "1e-2", "--quantize", "nf4", "--double-quant")
    assert train(*options).code == 0
    whole = file_hash(output)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after(3, monkeypatch)
        assert train(*options, "--overwrite").code == 130
    output.unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="--quantize 4: the run has nf4"):
        resume(output.parent, quantize=4)
    with pytest.raises(ConfigError, match="--quantized-compute dequantized: the run has auto"):
        resume(output.parent, quantized_compute="dequantized")
    resume(output.parent, quiet=True)
    assert file_hash(output) == whole


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float, float], None]]:
    """Make products run as on a GPU; yield a function that sets both forms' measured seconds."""
    seconds = {"quantized": 1.0, "dequantized": 1.0}

    def time_matmuls(model: Any, dtype: Any, tokens: int) -> TimedMatmuls:
        return TimedMatmuls("mlp.down_proj", tokens, *seconds.values())

    def set_seconds(quantized: float, dequantized: float) -> None:
        seconds.update(quantized=quantized, dequantized=dequantized)

    for module in (stored_layers, loading):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    monkeypatch.setattr(loading, "time_matmuls", time_matmuls)
    yield set_seconds


def recorded(output: Path) -> str:
    checkpoints = output.parent / "checkpoints"
    newest = max(checkpoints.glob("*/metadata.json"), key=lambda path: path.stat().st_mtime)
    return str(json.loads(newest.read_text())["quantized_compute"])


def test_gpu_takes_the_faster_form_and_prints_the_times(
    train: Cli, output: Path, on_gpu: Callable[[float, float], None]
) -> None:
    on_gpu(2e-3, 1.5e-3)
    done = train(*STEPS, "--quantize", "4", quiet=False)
    assert done.code == 0, done.err
    line = " ".join(done.err.split())
    assert "dequantized products: 1.5 ms for" in line
    assert "of mlp.down_proj, forward and backward; quantized: 2 ms" in line
    assert recorded(output) == "dequantized"
    on_gpu(1.5e-3, 1.45e-3)
    assert train(*STEPS, "--quantize", "4", "--overwrite").code == 0
    assert recorded(output) == "quantized"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["quantized", slow("dequantized")])
def test_resumed_run_keeps_the_form_even_if_another_is_faster_now(
    train: Cli, output: Path, on_gpu: Callable[[float, float], None], first: str
) -> None:
    fast = {"quantized": (1.0, 2.0), "dequantized": (2.0, 1.0)}
    other = next(form for form in fast if form != first)
    options = ("--quantize", "4", "--lr", "1e-2")
    on_gpu(*fast[first])
    assert train(*options).code == 0
    whole = file_hash(output)
    with pytest.MonkeyPatch.context() as stopping:
        stop_after(2, stopping)
        assert train(*options, "--overwrite").code == 130
    on_gpu(*fast[other])
    resume(output.parent, quiet=True)
    assert file_hash(output) == whole
    assert recorded(output) == first


def test_cpu_resumes_no_run_of_the_other_form(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Products are not timed, so that the first run keeps the quantised form.
    monkeypatch.setattr(loading, "on_cpu", lambda: True)
    with pytest.MonkeyPatch.context() as begun:
        begun.setattr(stored_layers, "on_cpu", lambda: False)
        stop_after(2, begun)
        assert train("--quantize", "4").code == 130
    monkeypatch.setattr(stored_layers, "on_cpu", lambda: True)
    with pytest.raises(ModelError, match="auto is dequantized on this machine"):
        resume(output.parent, quiet=True)


def test_quantized_folder_is_refused_in_a_line(train: Cli, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "q", "qwen3", quantize=4)
    error = train("--model-path", folder, "--quantize", "8").error
    assert "is already quantised: leave out --quantize 8" in error


def test_slow_products_are_warned_of(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "on_cpu", lambda: True)
    done = train(*STEPS, "--quantize", "4", "--quantized-compute", "quantized")
    assert done.code == 0
    assert "slowly on the CPU: --quantized-compute dequantized" in done.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quantize": "5"}, "--quantize must be one of 4, 8, mxfp4, nvfp4, mxfp8, nf4"),
        ({"double_quant": True}, "--double-quant goes with --quantize nf4"),
        ({"quantize": "4", "double_quant": True}, "--double-quant goes with --quantize nf4"),
        ({"quantize": "nf4", "quantized_compute": "quantized"}, "no products with nf4"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, object], problem: str) -> None:
    for config in (TrainConfig, BenchConfig):
        with pytest.raises(ConfigError, match=problem):
            config(model_path="m", data="d", **options)  # type: ignore[arg-type]


def test_peer_of_a_benchmark_must_know_the_format() -> None:
    with pytest.raises(ConfigError, match="does not support nf4"):
        BenchConfig(model_path="m", data=("d",), quantize="nf4", against="mlx-lm")


def test_number_in_a_config_file_is_a_format(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert TrainConfig(model_path="m", data=("d",), quantize=4).quantize == "4"  # type: ignore[arg-type]
    options = tmp_path / "options.yaml"
    options.write_text("quantize: 4\n")
    plain = cli("plan", "--model-path", model, "--json")
    quantized = cli("plan", "--model-path", model, "--json", "--config", options)
    assert quantized.code == 0, quantized.err
    found, before = json.loads(quantized.out), json.loads(plain.out)
    assert "quantised while loading (4-bit affine, group 64)" in found["model"]
    assert found["memory"]["weights"] < before["memory"]["weights"]


@pytest.mark.slow
def test_bench_measures_both_contestants_on_one_quantized_base(
    cli: Cli, model: Path, chat: Path
) -> None:
    given = ("--model-path", model, "--data", chat, "--steps", "2", "--repeats", "1", "--quiet")
    done = cli("bench", *given, "--quantize", "4", "--against", "mlx-lm", "--json", "-")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["options"]["quantize"] == "4"
    losses = [
        [step["loss"] for step in found[side]["runs"][0]["steps"]] for side in ("ours", "theirs")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("kind", ["--dora", slow("--rslora")])
def test_loras_family_trains_on_nf4(train: Cli, output: Path, kind: str) -> None:
    done = train(*STEPS, "--quantize", "nf4", kind)
    assert done.code == 0, done.err
    said = json.loads(output.with_name("adapter_config.json").read_text())["mlxtune"]
    assert (said["quantize"], said["rslora"]) == ("nf4", kind == "--rslora")
