"""Warnings of inspect about the model's template, the rows and the options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxtune.cli.options import load_config_file
from mlxtune.config import InspectConfig
from mlxtune.session.reader import Reader
from tests.command import Cli
from tests.models import CHATML, sums, write_chat, write_tokenizer

DATED = "{{ strftime_now('%d %b %Y') }}\n" + CHATML


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer and a template, and no model."""
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHATML)
    return tmp_path / "model"


def look(cli: Cli, folder: Path, data: Path, *arguments: object) -> list[dict[str, object]]:
    outcome = cli("inspect", "--model-path", folder, "--data", data, "--json", *arguments)
    return list(json.loads(outcome.out)["findings"])


def test_dated_template_is_a_warning_and_encodes_again_the_next_day(
    cli: Cli, folder: Path, chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = InspectConfig(str(folder), str(chat))
    assert not any("date" in str(one["kind"]) for one in look(cli, folder, chat))
    key = Reader(config, folder)._key(chat)

    (folder / "chat_template.jinja").write_text(DATED)
    kinds = [one["kind"] for one in look(cli, folder, chat)]
    assert kinds == ["the template writes today's date"]

    dated = Reader(config, folder)._key(chat)
    import datetime

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date(2099, 1, 1)

    monkeypatch.setattr(datetime, "date", Tomorrow)
    assert Reader(config, folder)._key(chat) != dated
    (folder / "chat_template.jinja").write_text(CHATML)
    assert Reader(config, folder)._key(chat) == key


def test_one_good_row_among_bad_ones_is_shown_and_refused_by_train(
    cli: Cli, train: Cli, folder: Path, tmp_path: Path
) -> None:
    data = write_chat(tmp_path / "data.jsonl", [*sums(1), "{}", "[]"])
    outcome = cli("inspect", "--model-path", folder, "--data", data)
    assert outcome.code == 1
    assert "error: one row cannot be both trained on and held out\n" in outcome.out
    assert f"{data}:2  its keys: none" in outcome.out
    assert "── " + str(data) + ":1" in outcome.out
    assert "train refuses this data: one row cannot be both trained on" in outcome.err
    assert (
        f"{data}: one row cannot be both trained on and held out: add rows or set --val-split 0; "
        f"skipped 2 other rows, the first: {data}:2: no 'messages' (its keys: none)"
    ) in train("--data", data).error
    write_chat(data, [*sums(1), "{}"])
    assert f"; skipped 1 other row: {data}:2: no 'messages' " in train("--data", data).error


def test_quiet_prints_warnings_only(cli: Cli, folder: Path, tmp_path: Path) -> None:
    data = write_chat(tmp_path / "data.jsonl", [*sums(3), *sums(1)])
    outcome = cli("inspect", "--model-path", folder, "--data", data, "--quiet")
    assert (outcome.code, outcome.out) == (0, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"warning: {data}:4: duplicate row (same as {data}:1)")


def test_finding_that_is_not_about_rows_counts_none(cli: Cli, folder: Path, chat: Path) -> None:
    outcome = cli("inspect", "--model-path", folder, "--data", chat, "--thinking", "on")
    assert "--thinking on changes nothing\n" in outcome.out


def test_names_of_fields_may_be_a_mapping_in_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("field:\n  prompt: question\n  completion: answer\n")
    options, problems = load_config_file(tmp_path / "config.yaml", InspectConfig)
    assert problems == []
    config = InspectConfig("model", "data.jsonl", **options)
    assert config.field == ("prompt=question", "completion=answer")
