"""`mlxtune push` from the command line, to a local hub."""

from __future__ import annotations

import json
import os
import pty
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import mlxtune
from mlxtune import TrainConfig, train
from mlxtune.errors import ConfigError, OutputError
from tests.command import Cli
from tests.hub_server import Dataset, Hub, Model
from tests.models import sums, write_chat, write_model

SECRET = "a-folder-that-nobody-should-see"
UPLOADED = [
    *("README.md", "adapter_config.json", "adapter_model.safetensors"),
    *("mlx-lm/adapter_config.json", "mlx-lm/adapters.safetensors"),
]


def run_in(folder: Path, data: str | Path, **options: object) -> Path:
    """Make a run with samples, on a model inside a secret folder."""
    model = folder / "tiny"
    if not model.exists():
        write_model(model, "llama")
    settings = {"targets": ("all",), "lr": 1e-2, "alpha": 11.0, "samples": 2, "quiet": True}
    output = str(folder / "out" / "adapters.safetensors")
    train(TrainConfig(str(model), (str(data),), output=output, **settings | options))  # type: ignore[arg-type]
    return folder / "out"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / SECRET
    folder.mkdir()
    return run_in(folder, write_chat(folder / "chat.jsonl", sums(20)))


@pytest.fixture
def run(made: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run to push, with a token that may push."""
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    return made


@pytest.fixture
def push(cli: Cli, run: Path) -> Callable[..., str]:
    def push(*arguments: str) -> str:
        outcome = cli("push", run, "me/sums", "--yes", *arguments)
        assert outcome.code == 0, outcome.err
        return outcome.out

    return push


def test_adapter_arrives_in_both_layouts_with_its_card(
    hub: Hub, push: Callable[..., str], run: Path
) -> None:
    out = push()
    files = hub.models["me/sums"].files
    assert sorted(files) == UPLOADED
    assert hub.models["me/sums"].private
    assert len(hub.models["me/sums"].commits) == 1
    assert out.endswith(f"{'Pushed':<12}{hub.endpoint}/me/sums\n")
    assert out.startswith(files["README.md"].decode())
    # The pushed adapter has the exact bytes of the run's adapter.
    assert files["mlx-lm/adapters.safetensors"] == (run / "adapters.safetensors").read_bytes()
    own = json.loads((run / "adapter_config.json").read_text())
    assert json.loads(files["mlx-lm/adapter_config.json"]) == {**own, "model": "tiny"}


def test_peft_layout_matches_export(
    hub: Hub, push: Callable[..., str], run: Path, tmp_path: Path
) -> None:
    push()
    config = mlxtune.ExportConfig(str(run), str(tmp_path / "peft"), format="peft", quiet=True)
    mlxtune.export(config)
    files = hub.models["me/sums"].files
    (tmp_path / "pushed.safetensors").write_bytes(files["adapter_model.safetensors"])
    pushed, exported = (
        load_file(path)
        for path in (tmp_path / "pushed.safetensors", tmp_path / "peft/adapter_model.safetensors")
    )
    assert {name: each.tolist() for name, each in pushed.items()} == {
        name: each.tolist() for name, each in exported.items()
    }
    exported_config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert json.loads(files["adapter_config.json"]) == {
        **exported_config,
        "base_model_name_or_path": "tiny",
    }


def test_nothing_that_is_sent_names_a_path_a_machine_or_a_row(
    hub: Hub, push: Callable[..., str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    push("--base-model", "org/tiny")
    sent = hub.sent() + b"".join(hub.stored.values())
    evaluation = json.loads((run / "checkpoints" / "evaluation.json").read_text())
    samples = evaluation["generated"]["samples"]
    assert samples
    rows = [json.loads(line) for line in (run.parent / "chat.jsonl").read_text().splitlines()]
    texts = [message["content"] for row in rows for message in row["messages"]]
    private = [
        *(SECRET, str(Path.home()), str(Path.cwd()), str(run), str(run.parent.parent)),
        *(socket.gethostname(), os.uname().nodename),
        *(sample[name] for sample in samples for name in ("prompt", "base", "adapted")),
        *texts,
    ]
    # Texts of up to three characters may occur in any upload by chance.
    assert [text for text in private if len(text) > 3 and text.encode() in sent] == []
    assert b"org/tiny" in sent
    assert len(sent) > 10_000


def test_dry_run_shows_the_upload_and_does_not_contact_the_hub(
    hub: Hub, cli: Cli, run: Path
) -> None:
    outcome = cli("push", run, "me/sums", "--dry-run")
    assert outcome.code == 0
    assert "# sums\n" in outcome.out
    listed = [line.split()[1].rstrip(",") for line in outcome.out.split("\n") if "File  " in line]
    assert sorted(listed) == UPLOADED
    assert "nothing was uploaded; me/sums would be private" in outcome.out
    assert hub.requests == []


def test_omission_of_samples_is_reported(cli: Cli, run: Path) -> None:
    outcome = cli("push", run, "me/sums", "--dry-run")
    assert "left out: they quote rows that are not public on the hub" in outcome.err
    assert "## Samples" not in outcome.out


@pytest.mark.slow
def test_samples_of_public_data_are_shown(
    hub: Hub, cli: Cli, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (made.parent / "chat.jsonl").read_bytes()
    hub.datasets["org/sums"] = Dataset({"main": {"train.jsonl": content}}, {"license": "mit"})
    shutil.copytree(made.parent / "tiny", tmp_path / "tiny")
    run = run_in(tmp_path, "org/sums", targets=("q_proj",), max_steps=1)
    outcome = cli("push", run, "me/sums", "--dry-run")
    assert "## Samples" in outcome.out
    assert "- `org/sums`: licence `mit`, commit `" in outcome.out
    assert "datasets:\n- org/sums\n" in outcome.out
    assert "--data org/sums/default@" in outcome.out


@pytest.mark.parametrize(("typed", "pushed"), [("y\n", True), ("\n", False), ("\x04", False)])
def test_question_is_asked_on_a_terminal(
    hub: Hub,
    cli: Cli,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    pushed: bool,
) -> None:
    master, slave = pty.openpty()
    os.write(master, typed.encode())
    with os.fdopen(slave, "r") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        outcome = cli("push", run, "me/sums")
    os.close(master)
    assert outcome.code == 0, outcome.err
    assert "Upload this to me/sums, new and private? [y/N]" in outcome.err
    assert ("me/sums" in hub.models) is pushed
    assert ("nothing was uploaded" in outcome.out) is not pushed


def test_upload_without_a_terminal_needs_yes(hub: Hub, cli: Cli, run: Path) -> None:
    outcome = cli("push", run, "me/sums")
    assert outcome.code == 2
    assert "There is no terminal to ask on: add --yes" in outcome.err
    assert hub.models == {}


# Refused uploads


def test_names_are_checked_first(hub: Hub, run: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        mlxtune.push(run, "sums", base_model="/tmp")
    assert raised.value.problems == [
        "the repository 'sums': write it as owner/name",
        "--base-model '/tmp': write it as owner/name",
    ]
    assert hub.requests == []


def test_adapter_that_the_run_did_not_write_is_refused(hub: Hub, run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    best = copy / "checkpoints" / "best" / "adapters.safetensors"
    other = next(copy.glob("checkpoints/epoch-*/adapters.safetensors"), best)
    data = bytearray(other.read_bytes())
    data[-1] ^= 1
    (copy / "adapters.safetensors").write_bytes(data)
    with pytest.raises(OutputError, match="is not the adapter that the run wrote"):
        mlxtune.push(copy, "me/sums", model_path=str(run.parent / "tiny"))
    assert hub.requests == []


def test_adapter_of_the_run_before_an_unfinished_one_is_refused(
    hub: Hub, run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "checkpoints" / "result.json").unlink()
    data = bytearray((copy / "adapters.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "adapters.safetensors").write_bytes(data)
    with pytest.raises(OutputError, match="is not the adapter of this unfinished run"):
        mlxtune.push(copy, "me/sums", model_path=str(run.parent / "tiny"))
    assert hub.requests == []


def test_folder_without_a_run_is_an_error(cli: Cli, hub: Hub, tmp_path: Path) -> None:
    assert "holds no run" in cli("push", tmp_path, "me/sums", "--yes").error


def test_hub_keeps_an_existing_repository_when_it_fails(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models["me/sums"] = Model(files={"README.md": b"old"})
    hub.faults.append(lambda handler, method, path: "commit/" in path and handler.drop() is None)
    with pytest.raises(OutputError):
        mlxtune.push(run, "me/sums")
    assert hub.models["me/sums"].files == {"README.md": b"old"}


def test_base_model_from_the_hub_is_known_by_its_name(hub: Hub, run: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(run.parent / "tiny", snapshot)
    mlxtune.push(run, "me/sums", model_path=str(snapshot))
    files = hub.models["me/sums"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "org/tiny"
    assert "base_model: org/tiny" in files["README.md"].decode()
