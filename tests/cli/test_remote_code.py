"""Code in a model folder runs only with --trust-remote-code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import Cli

CODE = """
from pathlib import Path
Path({marker!r}).write_text("run")
from mlx_lm.models.qwen3 import Model, ModelArgs
"""
TOKENIZER_CODE = """
from pathlib import Path
Path({marker!r}).write_text("run")
from transformers import PreTrainedTokenizerFast
class Own(PreTrainedTokenizerFast):
    pass
"""


def change(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | entries))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that the model folder's code writes when it runs."""
    return tmp_path / "marker"


@pytest.fixture
def with_model_code(broken: Path, marker: Path) -> Path:
    """A model folder that defines its architecture in code."""
    (broken / "own.py").write_text(CODE.format(marker=str(marker)))
    change(broken / "config.json", model_file="own.py")
    return broken


@pytest.fixture
def with_tokenizer_code(broken: Path, marker: Path) -> Path:
    """A model folder that defines its tokenizer in code."""
    (broken / "own.py").write_text(TOKENIZER_CODE.format(marker=str(marker)))
    change(
        broken / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": [None, "own.Own"]},
    )
    return broken


def test_code_of_a_model_runs_only_when_it_is_trusted(
    train: Cli, with_model_code: Path, marker: Path, output: Path
) -> None:
    error = train("--model-path", with_model_code).error
    assert str(with_model_code / "config.json") in error
    assert "'own.py'" in error
    assert "--trust-remote-code" in error
    assert not marker.exists()

    assert train("--model-path", with_model_code, "--trust-remote-code").code == 0
    assert marker.exists()
    assert output.is_file()


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_inspecting_a_model_does_not_run_its_code(
    cli: Cli, with_model_code: Path, chat: Path, marker: Path, command: str
) -> None:
    cli(command, "--model-path", with_model_code, "--data", chat)
    assert not marker.exists()


@pytest.mark.parametrize("file", ["../own.py", "/own.py", "a/../../own.py", 3, ["own.py"]])
def test_code_outside_of_the_folder_is_never_run(
    train: Cli, with_model_code: Path, marker: Path, file: Any
) -> None:
    (with_model_code / "own.py").rename(with_model_code.parent / "own.py")
    change(with_model_code / "config.json", model_file=file)
    error = train("--model-path", with_model_code, "--trust-remote-code").error
    assert "which is not in its folder" in error
    assert not marker.exists()


def test_tokenizer_code_runs_only_if_trusted_without_a_prompt(
    train: Cli, with_tokenizer_code: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(prompt: str = "") -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    train("--model-path", with_tokenizer_code)
    assert not marker.exists()
    assert train("--model-path", with_tokenizer_code, "--trust-remote-code").code == 0
    assert marker.exists()


@pytest.mark.slow
def test_trust_is_passed_on_to_both_contestants_of_a_benchmark(
    cli: Cli, with_model_code: Path, chat: Path, marker: Path, tmp_path: Path
) -> None:
    work = ["--model-path", with_model_code, "--data", chat, "--steps", 1, "--repeats", 1]
    json_file = ["--quiet", "--json", tmp_path / "bench.json"]
    assert "--trust-remote-code" in cli("bench", *work, "--quiet").error
    assert not marker.exists()
    arguments = [*work, *json_file, "--against", "mlx-lm", "--trust-remote-code"]
    assert cli("bench", *arguments).code == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [len(found[side]["runs"]) for side in ("ours", "theirs")] == [1, 1]


@pytest.mark.parametrize("kind", ["AutoTokenizer", "AutoConfig"])
@pytest.mark.parametrize("file", ["{outside}/own.Own", "../own.Own", "a/../../own.Own"])
def test_code_of_a_tokenizer_outside_of_the_folder_is_never_run(
    train: Cli, with_tokenizer_code: Path, marker: Path, file: str, kind: str
) -> None:
    folder = with_tokenizer_code
    (folder / "own.py").rename(folder.parent / "own.py")
    name = "config.json" if kind == "AutoConfig" else "tokenizer_config.json"
    file = file.format(outside=folder.parent)
    change(folder / name, auto_map={kind: file if kind == "AutoConfig" else [None, file]})
    error = train("--model-path", folder, "--trust-remote-code").error
    assert error == f"{folder / name}: asks to run {file!r:.100}, which is not in its folder"
    assert not marker.exists()


def test_resumed_run_trusts_no_code_that_its_folder_says_it_trusted(
    train: Cli, cli: Cli, with_model_code: Path, marker: Path, output: Path
) -> None:
    assert train("--model-path", with_model_code, "--trust-remote-code").code == 0
    marker.unlink()
    outcome = cli("train", "--resume", output.parent)
    assert outcome.code == 1
    assert "--trust-remote-code" in outcome.error
    assert not marker.exists()
    assert cli("train", "--resume", output.parent, "--trust-remote-code").code == 0
