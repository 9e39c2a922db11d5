"""Shell completion, which shells request through an environment variable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import Cli
from tests.paths import ROOT

COMMAND = [sys.executable, "-m", "mlxtune"]

Completed = Callable[..., list[str]]


@pytest.fixture
def completed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Completed:
    """Return a function that completes the word `last`, after other words."""

    def run(shell: str, *words: str, last: str = "") -> list[str]:
        monkeypatch.setenv("_MLXTUNE_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(["mlxtune", *words, last]))
        # fish passes the incomplete word, other shells its index.
        monkeypatch.setenv("COMP_CWORD", last if shell == "fish" else str(len(words) + 1))
        outcome = cli()
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out.split()

    return run


@pytest.mark.parametrize(
    ("shell", "dtypes"),
    [
        ("bash", ["plain,float32", "plain,float16"]),
        ("zsh", ["plain", "float32", "_", "plain", "float16", "_"]),
        ("fish", ["plain,float32", "plain,float16"]),
    ],
)
def test_each_shell_is_given_the_choices_that_begin_so(
    completed: Completed, shell: str, dtypes: list[str]
) -> None:
    assert completed(shell, "train", "--dtype", last="fl") == dtypes


def test_commands_and_options_are_completed(completed: Completed) -> None:
    assert "plain,train" in completed("bash", last="tr")
    assert completed("bash", "train", last="--val-sp") == ["plain,--val-split"]
    assert completed("bash", "runs", "--sort", last="tr") == ["plain,train"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--data"],
        ["train", "--config"],
        ["train", "--model-path"],
        ["train", "--checkpoint-dir"],
        ["train", "--resume"],
        ["inspect", "--html"],
        ["fuse", "--output"],
        ["verify", "--model-path"],
        ["verify"],
        ["report"],
        ["import"],
    ],
)
def test_files_and_folders_are_left_to_the_shell(completed: Completed, words: list[str]) -> None:
    assert completed("bash", *words, last="da") == ["file,da"]


def test_number_is_not_completed(completed: Completed) -> None:
    assert completed("bash", "train", "--rank", last="1") == []


def test_completion_imports_no_slow_modules() -> None:
    code = (
        "import sys\n"
        "from mlxtune.cli import main\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    words = {"COMP_WORDS": "mlxtune train --d", "COMP_CWORD": "2"}
    environment = {**os.environ, **words, "_MLXTUNE_COMPLETE": "bash_complete"}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "plain,--dtype" in process.stdout
    loaded = {name.partition(".")[0] for name in process.stderr.split()}
    assert not loaded & {"mlx", "mlx_lm", "transformers", "numpy", "rich"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_taken_by_its_shell_and_completes(tmp_path: Path, shell: str) -> None:
    script = tmp_path / "script"
    request = {**os.environ, "_MLXTUNE_COMPLETE": f"{shell}_source"}
    printed = subprocess.run(COMMAND, env=request, capture_output=True, text=True, check=True)
    assert f"_MLXTUNE_COMPLETE={shell}_complete" in printed.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}, which is not installed")
    script.write_text(printed.stdout)
    own = tmp_path / "mlxtune"
    own.write_text(f'#!/bin/sh\nexec {sys.executable} -m mlxtune "$@"\n')
    own.chmod(0o755)
    asked = {
        "bash": f"source {script}; COMP_WORDS=(mlxtune trai); COMP_CWORD=1; "
        "_mlxtune_completion mlxtune; echo ${COMPREPLY[@]}",
        # zsh completes only on a terminal, so this only checks that it loads the script.
        "zsh": f"autoload -U compinit; compinit -D; source {script}; echo ${{_comps[mlxtune]}}",
        "fish": f"source {script}; complete -C 'mlxtune trai'",
    }
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    root = ROOT
    environment["PYTHONPATH"] = str(root)
    process = subprocess.run(
        [shell, "-c", asked[shell]], env=environment, capture_output=True, text=True, check=True
    )
    expected = {"bash": "train", "zsh": "_mlxtune_completion", "fish": "train"}
    assert process.stdout.split()[0] == expected[shell]
