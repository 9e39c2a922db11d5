"""Outputs that cannot or must not be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.command import Cli, files_in


def test_output_folder_with_a_file_name_is_refused(train: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "a.safetensors"
    folder.mkdir()
    outcome = train("--output", folder)
    assert outcome.error == f"{folder} is a folder: --output takes the name of a file"


@pytest.mark.parametrize(
    ("option", "below"),
    [
        ("--output", "chat.jsonl/adapters.safetensors"),
        ("--output", "chat.jsonl/deeper/adapters.safetensors"),
        ("--checkpoint-dir", "chat.jsonl"),
        ("--checkpoint-dir", "chat.jsonl/deeper"),
    ],
)
def test_output_below_a_file_names_the_option_and_the_file(
    train: Cli, tmp_path: Path, chat: Path, option: str, below: str
) -> None:
    outcome = train(option, tmp_path / below, "--max-steps", 1)
    assert outcome.code == 1
    assert str(chat) in outcome.error
    assert option in outcome.error
    assert "free space" not in outcome.error
    assert files_in(tmp_path) == ["chat.jsonl"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("option", ["--output", "--checkpoint-dir"])
def test_folder_without_permission_is_found_before_training(
    train: Cli, tmp_path: Path, option: str
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    outcome = train(option, locked / "new" / "file")
    assert str(locked) in outcome.error
    assert "Permission denied" in outcome.error


@pytest.mark.parametrize("name", ["chat.jsonl", "val.jsonl", "broken/model.safetensors"])
def test_output_never_overwrites_an_input_of_the_run(
    train: Cli, broken: Path, chat: Path, tmp_path: Path, name: str
) -> None:
    shutil.copy(chat, tmp_path / "val.jsonl")
    before = (tmp_path / name).read_bytes()
    arguments = ["--model-path", broken, "--val-data", tmp_path / "val.jsonl", "--max-steps", 1]
    outcome = train(*arguments, "--output", tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert "--output" in outcome.error


def test_output_in_the_model_folder_is_refused(train: Cli, broken: Path) -> None:
    before = files_in(broken)
    outcome = train("--model-path", broken, "--output", broken)
    assert outcome.error == f"{broken} is the model's own folder: choose another --output"
    assert files_in(broken) == before


@pytest.mark.parametrize("name", ["", "step-2", "step-2/adapters.safetensors"])
def test_output_within_a_run_is_refused(train: Cli, own_run: Path, name: str) -> None:
    before = files_in(own_run)
    outcome = train("--output", own_run / name)
    assert f"is within the run in {own_run}: choose another --output" in outcome.error
    assert files_in(own_run) == before


@pytest.mark.parametrize("name", ["model.bin", "out/model.gguf", "adapter.json"])
def test_output_named_as_another_kind_of_file_is_refused(
    train: Cli, tmp_path: Path, name: str
) -> None:
    outcome = train("--output", tmp_path / name)
    assert ": an adapter is a .safetensors file: name one, or a folder, as --output" in (
        outcome.error
    )
    assert files_in(tmp_path) == ["chat.jsonl"]


def test_output_named_as_the_adapters_own_config_is_refused(train: Cli, tmp_path: Path) -> None:
    outcome = train("--output", tmp_path / "adapter_config.json", "--max-steps", 1)
    assert "--output" in outcome.error
    assert not (tmp_path / "adapter_config.json").exists()


def test_output_inside_a_checkpoint_is_written_or_refused_before_training(
    train: Cli, tmp_path: Path
) -> None:
    inside = tmp_path / "ck" / "best" / "adapters.safetensors"
    outcome = train(
        *("--output", inside, "--checkpoint-dir", tmp_path / "ck", "--val-split", 0),
        *("--max-steps", 1),
    )
    assert inside.is_file() or (outcome.code == 1 and files_in(tmp_path) == ["chat.jsonl"])


def test_adapter_that_no_run_in_the_folder_keeps_is_not_replaced(
    train: Cli, own_run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("adapters.safetensors", "adapter_config.json"):
        shutil.copy(own_run.parent / name, copy)
    files = {path: path.read_bytes() for path in copy.iterdir()}
    outcome = train("--output", copy, "--max-steps", 1)
    assert "is in no checkpoint of a run in this folder" in outcome.error
    assert {path: path.read_bytes() for path in copy.iterdir()} == files

    (copy / "adapters.safetensors").rename(copy / "adapter_model.bin")
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert (
        "adapter_config.json is in no checkpoint" in train("--output", copy, "--max-steps", 1).error
    )

    assert train("--output", copy, "--max-steps", 1, "--overwrite").code == 0
    assert train("--output", copy, "--max-steps", 1).code == 0


def test_checkpoint_without_adapter_protects_other_adapters(train: Cli, own_run: Path) -> None:
    adapter = own_run.parent / "adapters.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-4] + b"\0\0\0\1")
    (own_run / "best" / "adapters.safetensors").unlink()
    found = adapter.read_bytes()
    outcome = train("--output", adapter, "--checkpoint-dir", own_run, "--max-steps", 1)
    assert "is in no checkpoint of a run in this folder" in outcome.error
    assert adapter.read_bytes() == found
