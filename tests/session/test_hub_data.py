"""Commands on data sets of a local hub: fetched, pinned and recorded."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

import pytest

from mlxtune.config import DataConfig
from mlxtune.errors import DataError
from mlxtune.session.dataset import with_hub_data
from mlxtune.views.console import RunConsole
from tests.command import Cli
from tests.hub_server import CONVERTED, Dataset, Hub, commit_of
from tests.models import sums, write_chat


def lines(rows: list[list[tuple[str, str]]]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_chat(Path(folder) / "rows.jsonl", rows).read_bytes()


SPLITS = {
    "train.jsonl": lines(sums(20)),
    "validation.jsonl": lines(sums(30)[20:24]),
    "test.jsonl": lines(sums(30)[24:]),
}


@pytest.fixture(autouse=True)
def data(hub: Hub) -> Dataset:
    hub.datasets["org/sums"] = data = Dataset({"main": SPLITS}, {"license": "mit"})
    return data


def test_names_are_pinned_and_paths_are_left_alone(
    chat: Path, data: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    config = DataConfig("m", (str(chat), "org/sums"), val_data="org/sums:test")
    pinned, sets = with_hub_data(config, RunConsole())
    name = f"org/sums/default@{commit_of(SPLITS)}"
    assert pinned.data == (str(chat), name)
    assert pinned.val_data == f"{name}:test"
    assert sets.keys() == {pinned.data[1], pinned.val_data}
    assert with_hub_data(pinned, RunConsole(quiet=True))[0] == pinned
    said = capsys.readouterr().err.split("\n")
    assert said[0] == (
        f"Hub         org/sums:train and org/sums:validation: 2 files, commit {name[17:27]}, "
        "licence: mit"
    )
    assert said[1].startswith("Hub         org/sums:test: 1 file, ")


def test_paths_alone_are_the_same_options(hub: Hub, chat: Path) -> None:
    config = DataConfig("m", (str(chat),))
    assert with_hub_data(config, RunConsole()) == (config, {})
    assert hub.requests == []


def test_data_without_a_license_is_reported_as_such(
    data: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    data.card = {}
    with_hub_data(DataConfig("m", ("org/sums:test",)), RunConsole())
    assert capsys.readouterr().err.endswith("licence: not stated\n")


def test_evaluation_takes_the_test_split_like_a_folder(data: Dataset) -> None:
    config, _ = with_hub_data(DataConfig("m", ("org/sums",)), RunConsole(quiet=True), held_out=True)
    assert config.data[0].endswith(":test")


def test_evaluation_takes_the_test_file_of_a_folder_with_its_weight(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    for name in ("train", "test"):
        write_chat(folder / f"{name}.jsonl", sums(4))
    config = DataConfig("m", (f"{folder}=2", f"{folder}/train.jsonl"))
    held_out, _ = with_hub_data(config, RunConsole(), held_out=True)
    assert held_out.data == (f"{folder}/test.jsonl=2", f"{folder}/train.jsonl")
    assert with_hub_data(config, RunConsole())[0].data == config.data


@pytest.mark.parametrize("value", ["~nosuch/x", "./missing/rows", "./missing/rows=2", "x" * 300])
def test_evaluation_reads_paths_as_training_does(
    cli: Cli, model: Path, hub: Hub, value: str
) -> None:
    train, evaluated = (
        cli(command, "--model-path", model, "--data", value) for command in ("train", "eval")
    )
    assert evaluated.code == train.code == 1
    assert evaluated.err == train.err
    assert "check --data" in train.err or "File name too long" in train.err
    assert hub.requests == []


def test_validation_data_needs_a_split(chat: Path) -> None:
    config = DataConfig("m", (str(chat),), val_data="org/sums")
    with pytest.raises(DataError, match=r"--val-data org/sums: name one of its splits, as org/s"):
        with_hub_data(config, RunConsole())


# In commands


def test_run_records_where_its_data_came_from(train: Cli, output: Path) -> None:
    assert train("--data", "org/sums").code == 0
    about = json.loads((output.parent / "checkpoints" / "run.json").read_text())
    name = f"org/sums/default@{commit_of(SPLITS)}"
    assert about["config"]["data"] == [name]
    assert about["hub"] == [
        {
            "name": name,
            "repository": "org/sums",
            "config": "default",
            "titles": {"train": "org/sums:train", "validation": "org/sums:validation"},
            "commit": commit_of(SPLITS),
            "license": "mit",
            "public": True,
        }
    ]
    ledgers = json.loads((output.parent / "checkpoints" / "ledger.json").read_text())
    assert {
        ledger["path"]: (ledger["rows_train"], ledger["rows_validation"]) for ledger in ledgers
    } == {
        "org/sums:train": (20, 0),
        "org/sums:validation": (0, 4),
    }


def test_reports_name_the_data_set_and_not_its_files(train: Cli, cli: Cli, output: Path) -> None:
    train("--data", "org/sums:train")
    (run,) = json.loads(cli("runs", output.parent, "--json").out)
    assert run["data"] == ["org/sums:train"]
    assert "on org/sums:train" in run["headline"]


def test_resumed_run_reads_the_commit_that_it_began_with(
    train: Cli, cli: Cli, hub: Hub, data: Dataset, output: Path, tmp_path: Path
) -> None:
    assert train("--data", "org/sums:train", "--max-steps", 2, "--save-steps", 1).code == 0
    data.revisions = {"main": {"train.jsonl": lines(sums(10))}, "old": SPLITS}
    hub.requests.clear()
    outcome = cli("train", "--resume", output.parent, "--max-steps", 3, "--quiet")
    assert outcome.code == 0, outcome.err
    assert hub.requests == []

    # Without the hub's cache, the run fetches the data again.
    (tmp_path / "hub-cache").rename(tmp_path / "away")
    outcome = cli("train", "--resume", output.parent, "--max-steps", 4, "--quiet")
    assert outcome.code == 0, outcome.err
    assert commit_of(SPLITS) in hub.asked("resolve")[0]


def test_run_is_resumed_from_another_folder(
    train: Cli, cli: Cli, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("--data", "org/sums:train", "--max-steps", 2, "--save-steps", 1).code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli("train", "--resume", output.parent, "--max-steps", 3, "--quiet").code == 0


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_commands_before_training_read_the_same(cli: Cli, model: Path, command: str) -> None:
    outcome = cli(command, "--model-path", model, "--data", "org/sums", "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    if command == "inspect":
        assert [file["path"] for file in found["files"]] == [
            "org/sums:train",
            "org/sums:validation",
        ]
    else:
        assert found["data"]["rows"] == 20


def test_evaluation_reads_the_test_split(cli: Cli, model: Path) -> None:
    outcome = cli("eval", "--model-path", model, "--data", "org/sums", "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["rows"] == 6


def test_hubs_parquet_is_read_with_named_fields(inspect: Cli, hub: Hub) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"question": f"{i} + 1?", "reply": str(i + 1)} for i in range(30)]
    shards = {}
    for number, part in enumerate((rows[:20], rows[20:])):
        file = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(part), file)
        shards[f"main/train/{number:04}.parquet"] = file.getvalue()
    hub.datasets["org/sums"].revisions[CONVERTED] = shards
    fields = ["--field", "prompt=question", "--field", "completion=reply"]
    outcome = inspect("--data", "org/sums", *fields, "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    files = json.loads(outcome.out)["files"]
    assert [(each["path"], each["rows_read"]) for each in files] == [
        ("org/sums/main:train/0000.parquet", 20),
        ("org/sums/main:train/0001.parquet", 10),
    ]


def test_error_of_the_hub_ends_a_command_in_one_line(train: Cli, output: Path) -> None:
    assert train("--data", "org/none").error.startswith("org/none: no such file or folder here")
    assert not output.parent.exists()


def test_local_data_needs_no_request(train: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    assert train().code == 0
    assert hub.requests == []
