"""Refusals of `mlxtune inspect`: the same as train's, and outputs that must not be written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import ROWS, Cli, Outcome, files_in, unless_given
from tests.models import CHATML, sums, write_chat, write_model, write_tokenizer

WITHOUT_END = CHATML.replace("<|im_end|>\\n", "\\n")
DOUBLE_BOS = "{{ bos_token }}{{ bos_token }}" + CHATML


def with_template(source: str, **tokenizer: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        write_tokenizer(folder, **tokenizer)
        (folder / "chat_template.jinja").write_text(source)

    return change


def as_it_is(_: Path) -> None:
    pass


# The data, changes to the model, options, and the message.
REFUSED: dict[str, tuple[list[Any], Callable[[Path], object], list[object], str]] = {
    "mixed formats": (
        [*sums(2), {"text": "x"}],
        *(as_it_is, []),
        "{file}:3: is in the text format, but the file is in the chat format from row 1 on",
    ),
    "strict": (
        [*sums(2), {"words": "x"}],
        *(as_it_is, ["--strict"], "{file}:3: no 'messages' (its keys: 'words'); 1 of 3 rows"),
    ),
    "no row": (["# nothing"], as_it_is, [], "{file} has no rows"),
    "no good row": ([{"messages": []}], as_it_is, [], "{file}: its only row cannot be used"),
    "all rows cut": (
        sums(3),
        *(as_it_is, ["--max-seq-len", 4], "the answer starts at token "),
    ),
    "missing": (sums(3), as_it_is, ["--data", "no.jsonl"], "no.jsonl: no such file: check --data"),
    "missing validation": (
        sums(3),
        *(as_it_is, ["--val-data", "no.jsonl"], "no.jsonl: no such file: check --val-data"),
    ),
    "given twice": (sums(3), as_it_is, ["--data", "{file}"], "{file} is given twice"),
    "other vocabulary": (
        sums(3),
        *(with_template(CHATML, extra=[f"<extra_{i}>" for i in range(100)]), []),
        "but the model knows only 320 tokens: use the model's own tokenizer files",
    ),
    "BOS twice": (
        sums(3),
        *(with_template(DOUBLE_BOS, bos=True), [], "BOS twice at the start"),
    ),
    "no end of turn": (
        sums(3),
        *(with_template(WITHOUT_END), [], "{file}:1: no end-of-turn token (looked for <|im_end|>"),
    ),
    "no template": (
        sums(3),
        *(with_template("{% for %}"), [], "chat template cannot be read: line 1: "),
    ),
    "no tokenizer": (
        sums(3),
        *(lambda folder: (folder / "tokenizer.json").write_text("{"), [], "download it again"),
    ),
    "no model": (sums(3), as_it_is, ["--model-path", "no"], "no: no such folder: check --model-"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_inspect_refuses_what_train_refuses(
    cli: Cli,
    broken: Path,
    tmp_path: Path,
    output: Path,
    case: tuple[list[Any], Callable[[Path], object], list[object], str],
) -> None:
    rows, change, options, said = case
    file = write_chat(tmp_path / "data.jsonl", rows)
    change(broken)
    options = [str(option).format(file=file) for option in options]
    arguments = [*unless_given(options, model_path=broken), "--data", file, *options]
    found = [
        cli("train", *arguments, "--output", output, "--quiet"),
        cli("inspect", *arguments, "--quiet"),
        cli("inspect", *arguments, "--json", "--dump", tmp_path / "dump.jsonl"),
    ]
    for outcome in found:
        assert outcome.code == 1
        assert said.format(file=file) in last_line(outcome)
    if "BOS" not in said:
        assert len({last_line(outcome) for outcome in found}) == 1
        assert not found[2].out
        assert not (tmp_path / "dump.jsonl").exists()
    assert not output.parent.exists()


def last_line(outcome: Outcome) -> str:
    return outcome.err.splitlines()[-1]


def test_data_that_train_refuses_is_shown_before_it_is_refused(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tokenizer(folder, bos=True)
    (folder / "chat_template.jinja").write_text(DOUBLE_BOS)
    file = write_chat(tmp_path / "data.jsonl", sums(3))
    arguments = ["inspect", "--model-path", folder, "--data", file, "--row", 1]
    shown = cli(*arguments)
    assert shown.code == 1
    assert "error: BOS twice at the start (3 rows)" in shown.out
    assert "⟦It is 0<|im_end|>⟧" in shown.out
    assert shown.err == "mlxtune: error: train refuses this data: BOS twice at the start\n"
    found = cli(*arguments, "--json")
    (error,) = json.loads(found.out)["findings"]
    assert (error["level"], error["rows"]) == ("error", 3)
    assert (found.code, found.err) == (1, shown.err)

    # A template that writes BOS once is correct.
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHATML)
    assert cli(*arguments).code == 0


def test_folder_without_a_template_needs_a_config_or_a_named_one(
    cli: Cli, tmp_path: Path, chat: Path
) -> None:
    write_tokenizer(tmp_path / "model")
    arguments = ["inspect", "--model-path", tmp_path / "model", "--data", chat]
    assert cli(*arguments).error == (
        f"{tmp_path / 'model'} has no config.json: is this a model folder?"
    )
    assert cli(*arguments, "--template", "qwen3").code == 0


# Outputs


@pytest.mark.parametrize("option", ["--html", "--dump"])
@pytest.mark.parametrize(
    "name",
    ["chat.jsonl", "link.jsonl", "val.jsonl", "broken/config.json", "broken/model.safetensors"],
)
def test_output_never_overwrites_an_input(
    inspect: Cli, broken: Path, chat: Path, tmp_path: Path, option: str, name: str
) -> None:
    shutil.copy(chat, tmp_path / "val.jsonl")
    (tmp_path / "link.jsonl").symlink_to(chat)
    before = (tmp_path / name).read_bytes()
    arguments = ["--model-path", broken, "--val-data", tmp_path / "val.jsonl"]
    outcome = inspect(*arguments, option, tmp_path / name)
    assert (outcome.code, (tmp_path / name).read_bytes()) == (1, before)
    assert outcome.error == f"{tmp_path / name} is read by this run: choose another " + (
        "--html or --dump"
    )


def test_output_never_overwrites_an_input_under_another_name(
    inspect: Cli, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = chat.read_bytes()
    (tmp_path / "link.jsonl").symlink_to(chat)
    monkeypatch.chdir(tmp_path)
    for data in ("link.jsonl", "chat.jsonl", "./chat.jsonl"):
        for written in (chat, "link.jsonl", "chat.jsonl"):
            assert "is read by this run" in inspect("--data", data, "--dump", written).error
    assert chat.read_bytes() == before


@pytest.mark.parametrize("option", ["--html", "--dump"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "is a folder"),
        ("chat.jsonl/below", "chat.jsonl is a file"),
        ("pipe", "not a regular file"),
    ],
)
def test_output_that_cannot_be_written_is_found_before_any_work(
    inspect: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str, said: str
) -> None:
    import mlxtune.session.reader

    monkeypatch.setattr(mlxtune.session.reader.Reader, "encode", None)
    os.mkfifo(tmp_path / "pipe")
    outcome = inspect(option, tmp_path / name)
    assert said in outcome.error
    assert option in outcome.error
    assert files_in(tmp_path) == ["chat.jsonl"]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/dev/null", "/dev/new"])
def test_device_is_not_replaced_as_a_file(
    inspect: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # If the check fails, this test must not replace the device.
    monkeypatch.setattr("mlxtune.session.session.load_dataset", None)
    assert inspect("--dump", name).error == (
        f"{name} cannot be written as a file: choose another --html or --dump"
    )


def test_page_and_dump_of_one_name_are_refused(inspect: Cli, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    outcome = inspect("--html", tmp_path / "a", "--dump", tmp_path / "new" / ".." / "a")
    assert outcome.code == 2
    assert outcome.error == ("--html and --dump name the same file: choose another for one of them")


def test_earlier_output_is_replaced_whole(inspect: Cli, tmp_path: Path) -> None:
    dump = tmp_path / "dump.jsonl"
    dump.write_text("x" * 100_000)
    assert inspect("--dump", dump, "--quiet").code == 0
    assert [json.loads(line)["row"] for line in dump.read_text().splitlines()] == list(
        range(1, ROWS + 1)
    )
    assert files_in(tmp_path) == ["chat.jsonl", "dump.jsonl"]


def test_refused_row_writes_nothing(inspect: Cli, tmp_path: Path) -> None:
    assert inspect("--row", 99, "--dump", tmp_path / "new" / "dump.jsonl").code == 1
    assert files_in(tmp_path) == ["chat.jsonl"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--row", 0], "--row must be at least 1, not 0"),
        (["--row", "x"], "--row must be a whole number, not 'x'"),
        (["--html", ""], "--html is empty"),
        (["--dump", " "], "--dump is empty"),
        (["--rank", 4], "No such option '--rank'"),
        (["--thinking", "yes"], "--thinking must be one of auto, on, off"),
        (["--format", "csv"], "--format must be one of auto, chat, prompt, alpaca, sharegpt, text"),
        (["--field", "prompt"], "--field 'prompt' is not a pair such as prompt=question"),
        (["--field", "promt=q"], "--field 'promt' is not a field, did you mean prompt?"),
        (["--field", "text=a", "--field", "text=b"], "--field text is given twice"),
    ],
)
def test_wrong_option_is_one_line_and_exits_with_2(
    inspect: Cli, arguments: list[object], said: str
) -> None:
    outcome = inspect(*arguments)
    assert outcome.code == 2
    assert said in outcome.error


def test_model_with_broken_weights_can_be_inspected(cli: Cli, tmp_path: Path, chat: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    for damage in (b"", None):
        (folder / "model.safetensors").unlink()
        if damage is not None:
            (folder / "model.safetensors").write_bytes(damage)
        assert cli("inspect", "--model-path", folder, "--data", chat, "--quiet").code == 0
