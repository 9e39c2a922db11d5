"""Data is encoded once, unless something on which the encoding depends has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlxtune.session.reader
from mlxtune import TrainConfig, train
from mlxtune.config import DataConfig
from mlxtune.session.dataset import Dataset, load_dataset
from mlxtune.session.reader import Reader
from tests.command import Cli, files_in
from tests.models import CHATML, sums, write_chat, write_model, write_tokenizer
from tests.paths import DATA

Load = Callable[..., Dataset]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose tokenizer was loaded."""
    loaded: list[Path] = []
    whole = mlxtune.session.reader.load_tokenizer

    def load(folder: Path, **options: Any) -> Any:
        loaded.append(folder)
        return whole(folder, **options)

    monkeypatch.setattr(mlxtune.session.reader, "load_tokenizer", load)
    return loaded


@pytest.fixture
def load(folder: Path, chat: Path, tmp_path: Path) -> Load:
    def load(**options: Any) -> Dataset:
        defaults = {"data": str(chat), "val_split": 0, "cache_dir": str(tmp_path / "cache")}
        config = DataConfig(**{"model_path": str(folder), **defaults, **options})
        return load_dataset(config, Reader(config, Path(config.model_path)))

    return load


def content(dataset: Dataset) -> list[Any]:
    examples = [(e.row, e.tokens.tolist(), e.assistant_mask.tolist()) for e in dataset.corpus]
    return [examples, [ledger.as_dict() for ledger in dataset.ledgers], dataset.findings]


def test_second_time_gives_the_same_without_the_tokenizer(
    load: Load, loads: list[Path], chat: Path
) -> None:
    # All cached parts of a file: examples, skipped rows, notes.
    rows = [*sums(9), *[{"words": i} for i in range(9)], [("user", "<|im_end|>"), *sums(1)[0][1:]]]
    write_chat(chat, ["# a comment", *rows, *sums(2)])
    first = load()
    assert len(loads) == 1
    second = load()
    assert len(loads) == 1
    assert content(first) == content(second) == content(load(no_cache=True))
    assert len(loads) == 2
    assert first.ledgers[0].rows_skipped == {"no 'messages'": 9}
    assert list(first.files[0].skipped.warnings()) == list(second.files[0].skipped.warnings())
    assert {finding.kind for finding in second.findings} == {
        *("duplicate row", "control token written in content")
    }


def test_limit_and_split_use_the_same_entry(load: Load, loads: list[Path]) -> None:
    load()
    load(max_seq_len=36, val_split=0, seed=7, batch_size=1)
    assert len(loads) == 1
    # The texts of rows held out are compared with those trained on, which takes the tokenizer.
    cut = load(max_seq_len=36, val_split=0.5, seed=7, batch_size=1)
    assert cut.ledgers[0].rows_truncated > 0
    assert content(cut) == content(load(max_seq_len=36, val_split=0.5, no_cache=True))


def test_same_content_under_another_name_uses_the_same_entry(
    load: Load, loads: list[Path], chat: Path, tmp_path: Path
) -> None:
    write_chat(chat, [*sums(3), {"words": 1}])
    load()
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(chat.read_bytes())
    found = load(data=str(copy))
    assert len(loads) == 1
    assert found.ledgers[0].path == str(copy)
    assert next(found.files[0].skipped.warnings()).startswith(f"{copy}:4: ")


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "data": lambda folder, chat: chat.write_text(chat.read_text().replace("What", "What now")),
    "template": lambda folder, chat: (folder / "chat_template.jinja").write_text("Hi " + CHATML),
    "tokenizer": lambda folder, chat: write_tokenizer(folder, extra=["What"]),
    "end of turn": lambda folder, chat: edit_json(folder / "config.json", eos_token_id=3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_file_is_encoded_again(
    load: Load, loads: list[Path], folder: Path, chat: Path, change: Callable[[Path, Path], object]
) -> None:
    before = content(load())
    change(folder, chat)
    after = content(load())
    assert len(loads) == 2
    assert after == content(load(no_cache=True))
    if change is not CHANGES["end of turn"]:
        assert after != before


def test_changed_file_of_equal_size_and_time_is_encoded_again(
    load: Load, loads: list[Path], chat: Path
) -> None:
    load()
    before = chat.stat()
    chat.write_text(chat.read_text().replace("What", "Whut"))
    os.utime(chat, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert content(load()) == content(load(no_cache=True))
    assert len(loads) == 3


def test_changed_option_encodes_again(load: Load, loads: list[Path]) -> None:
    options: list[dict[str, Any]] = [
        *({"template": "qwen3"}, {"template": "gemma"}, {"turns": "last"}, {"thinking": "off"}),
        *({"merge_system": True}, {"format": "chat"}, {"field": "messages=messages"}),
    ]
    load()
    for number, option in enumerate(options, 2):
        load(**option)
        assert len(loads) == number, option
    assert content(load(turns="last")) == content(load(turns="last", no_cache=True))
    assert len(loads) == len(options) + 2


def test_other_code_version_encodes_again(
    load: Load, loads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = mlxtune.session.reader._code_hashes()
    load()
    name = next(iter(hashes))
    monkeypatch.setattr(mlxtune.session.reader, "_code_hashes", lambda: hashes | {name: "new"})
    load()
    assert len(loads) == 2


def test_code_that_decides_what_is_encoded_is_in_the_key(tmp_path: Path) -> None:
    """Find every module whose code runs to encode data, except modules that only read files."""
    code = (
        "import sys, threading; from pathlib import Path; from mlxtune.config import DataConfig\n"
        "from mlxtune.session.reader import Reader\n"
        "config = DataConfig(sys.argv[1], sys.argv[2], no_cache=True)\n"
        "ran = set()\n"
        "def note(frame, *_): ran.add(str(frame.f_globals.get('__name__')))\n"
        "threading.setprofile(note); sys.setprofile(note)\n"
        "Reader(config, Path(sys.argv[1])).encode(Path(sys.argv[2]))\n"
        "sys.setprofile(None)\n"
        "print(*(name for name in ran if name.startswith('mlxtune.')))"
    )
    rows = (DATA / "bookings_test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    data = tmp_path / "bookings.jsonl"
    data.write_text("".join(rows[:20]), encoding="utf-8")
    arguments = [str(DATA / "demo-qwen3"), str(data)]
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    used = {name.removeprefix("mlxtune.").replace(".", "/") for name in process.stdout.split()}
    # The recipe and the options only select the data; the removed modules only read or check files.
    used = {name for name in used if name.startswith(("core/", "backend/")) and name.count("/") > 1}
    hashed = set(mlxtune.session.reader._code_hashes())
    used -= {"backend/models/model_folder", "backend/models/model_config"}
    used -= {f"core/files/{name}" for name in ("ours", "reading", "scratch", "writing")}
    # processes.py only passes lines on.
    used -= {"core/files/processes"}
    assert used <= hashed


@pytest.mark.slow
def test_entry_of_another_process_is_used(cli: Cli, chat: Path, loads: list[Path]) -> None:
    model = DATA / "demo-qwen3"
    arguments = ["inspect", "--model-path", str(model), "--data", str(chat), "--quiet"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "mlxtune", *arguments]
    subprocess.run(command, check=True, env=environment)
    # Rows held out would be compared by their texts, which takes the tokenizer.
    config = DataConfig(str(model), str(chat), val_split=0)
    load_dataset(config, Reader(config, model))
    assert loads == []


def test_train_and_inspect_share_their_entries(
    folder: Path, chat: Path, loads: list[Path], cli: Cli, tmp_path: Path
) -> None:
    options = ["--model-path", folder, "--data", chat, "--cache-dir", tmp_path / "cache"]
    assert cli("inspect", *options, "--quiet").code == 0
    assert len(loads) == 1
    entries = sorted((tmp_path / "cache").rglob("mask"))
    output = str(tmp_path / "out" / "adapters.safetensors")
    cached = {"cache_dir": str(tmp_path / "cache"), "output": output, "quiet": True}
    train(TrainConfig(str(folder), str(chat), max_steps=1, samples=0, **cached))
    assert sorted((tmp_path / "cache").rglob("mask")) == entries


def test_no_cache_reads_and_keeps_nothing(load: Load, loads: list[Path], tmp_path: Path) -> None:
    load(no_cache=True)
    assert not (tmp_path / "cache").exists()
    load()
    kept = files_in(tmp_path / "cache")
    load(no_cache=True)
    assert len(loads) == 3
    assert files_in(tmp_path / "cache") == kept


def test_cache_is_the_users_unless_a_folder_is_named(
    folder: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("needs Linux, where XDG_CACHE_HOME is heeded by every platformdirs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    config = DataConfig(str(folder), str(chat))
    load_dataset(config, Reader(config, folder))
    assert list((tmp_path / "home" / "mlxtune" / "encoded").glob("*/account.json"))
    assert DataConfig("m", "d", cache_dir="~/x").cache_path == Path.home() / "x"
    assert DataConfig("m", "d", cache_dir="~/x", no_cache=True).cache_path is None


@pytest.mark.parametrize("below", ["chat.jsonl", "chat.jsonl/below", "locked"])
def test_run_continues_without_an_unwritable_cache(
    load: Load, chat: Path, tmp_path: Path, below: str
) -> None:
    if below == "locked":
        (tmp_path / below).mkdir(mode=0o500)
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
    before = chat.read_bytes()
    assert content(load(cache_dir=str(tmp_path / below))) == content(load(no_cache=True))
    assert chat.read_bytes() == before


def test_damaged_entry_is_encoded_again(load: Load, loads: list[Path], tmp_path: Path) -> None:
    expected = content(load())
    (file,) = (tmp_path / "cache").glob("*/tokens")
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    assert content(load()) == expected
    assert len(loads) == 2
    assert content(load()) == expected
    assert len(loads) == 2
