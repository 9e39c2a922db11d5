"""`mlxtune report`, `mlxtune.report`, and the page at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mlxtune
from mlxtune import OutputError
from mlxtune.core.run.stored_run import read_run
from mlxtune.core.run.summary import RunView
from mlxtune.views.pages.run_page import ResultCard, write_page
from mlxtune.views.parts import run_figures
from tests.command import Cli
from tests.runs import EVALUATION, write_rewarded_run, write_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_page_of_a_run_is_written_into_its_folder(cli: Cli) -> None:
    run = write_run(Path("out"), evaluation=EVALUATION)
    for _ in range(2):  # the second page replaces the first
        outcome = cli("report", "out")
        assert outcome.code == 0
        assert outcome.out.splitlines() == [
            "2 epochs on chat.jsonl took tiny’s validation loss from 4.00 to 1.00",
            "✓ The adapter helped: it takes 75% off the loss of the base model, 3.0000 nats per "
            "token (95% interval 2.7500 to 3.2000), on 8 rows, 320 supervised tokens.",
            "page: out/checkpoints/report.html",
        ]
        assert outcome.err == ""
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_run_with_rewards_says_what_changed(cli: Cli) -> None:
    write_rewarded_run(Path("out"))
    assert cli("report", "out").out.splitlines() == [
        "reward json fell while short.short rose: 12 steps (0.3 epochs) on chat.jsonl took tiny’s "
        "mean reward of sampled answers from 1.12 to 1.52",
        "! Reward json fell while short.short rose: the model may be exploiting short.short: read "
        "the answers of the last steps in the report. The run finished. Its adapter: "
        "out/adapters.safetensors",
        "sum of rewards rose: 1.12 in the first third of the steps, 1.52 in the last",
        "json fell: 0.875 in the first third of the steps, 0.475 in the last",
        "short.short rose: 0.125 in the first third of the steps, 0.525 in the last",
        "tokens per answer fell: 37.5 in the first third of the steps, 29.5 in the last",
        "divergence from the start (KL) rose: 0.025 in the first third of the steps, 0.105 in the "
        "last",
        "page: out/checkpoints/report.html",
    ]


def test_comparison_page_is_written_to_html_path(cli: Cli) -> None:
    write_run(Path("a"))
    write_run(Path("b"), epochs=4, options={"lr": 5e-3})
    outcome = cli("report", "a", "b", "--html", "new/both.html")
    assert outcome.code == 0
    assert "Of 2 runs, b has the lowest validation loss, 0.500" in outcome.out
    assert "--lr: 0.0001 | 0.005" in outcome.out
    assert "Options that differ" in Path("new/both.html").read_text()
    assert not Path("a/checkpoints/report.html").exists()

    assert cli("report", "a", "b").code == 0
    assert Path("comparison.html").exists()

    write_run(Path("c"), options={"seed": 7})
    assert "2 runs side by side, validated on different rows" in cli("report", "a", "c").out
    assert json.loads(cli("report", "a", "c", "--json").out)["validated_alike"] is False


def test_json_is_for_programs_and_writes_no_page_unasked(cli: Cli) -> None:
    run = write_run(Path("out"), evaluation=EVALUATION)
    outcome = cli("report", "out", "--json")
    (found,) = json.loads(outcome.out)["runs"]
    assert (found["status"], found["best_val_loss"], found["step"]) == ("finished", 1.0, 80)
    assert found["planned"]["padding_share"] == 0.05
    assert found["measured"]["micro_batches_per_step"] == 2
    assert found["validations"][0] == {"step": 0, "loss": 4.0}
    assert found["evaluation"]["verdict"] == "helped"
    assert found["config"]["epochs"] == 2
    assert not (run / "report.html").exists()
    assert cli("report", "out", "--json", "--html", "page.html").out == outcome.out
    assert Path("page.html").exists()


def test_report_marks_an_unfinished_and_damaged_run(cli: Cli) -> None:
    run = write_run(Path("out"), finished=False)
    (run / "ledger.json").write_text("{")
    outcome = cli("report", "out")
    assert outcome.code == 0
    assert "stopped at step 60 of 80" in outcome.out
    assert "problem: ledger.json is not a list of ledgers" in outcome.out
    assert "! The run is unfinished. Resume it with mlxtune train --resume out" in outcome.out


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("evaluation", [EVALUATION, None])
def test_text_page_and_card_describe_a_run_alike(
    cli: Cli, finished: bool, evaluation: dict[str, Any] | None
) -> None:
    folder = write_run(Path("out"), finished=finished, evaluation=evaluation)
    text, page = cli("report", "out").out, (folder / "report.html").read_text()
    view, card = RunView.of(read_run(folder)), ResultCard(read_run(folder), "").text()
    for sentence in (view.headline, view.verdict.text):
        assert sentence in text
        assert sentence in card
        assert sentence in page
    for name, value in run_figures(view).items():
        assert f"{value}  {name}" in card
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("none",), "none: no such folder: name the folder of a run"),
        (("empty",), "empty holds no run"),
        (("out", "--html", "empty"), "empty is a folder"),
        (("out", "--html", ""), "--html is empty"),
        (("out", "--html", "out/checkpoints/metrics.jsonl"), "is not a page of mlxtune report"),
        (("out", "--html", "out/adapters.safetensors"), "is not a page of mlxtune report"),
        (("mine",), "report.html is not a page of mlxtune report"),
    ],
)
def test_impossible_request_is_an_error_that_names_it(
    cli: Cli, arguments: tuple[str, ...], problem: str
) -> None:
    Path("empty").mkdir()
    write_run(Path("out"))
    run = write_run(Path("mine"))
    (run / "report.html").write_text("my own notes")
    assert problem in cli("report", *arguments).error
    assert (run / "report.html").read_text() == "my own notes"
    assert Path("out/adapters.safetensors").read_bytes() == b"weights"
    assert b"kind" in Path("out/checkpoints/metrics.jsonl").read_bytes()


def test_help_has_an_example(cli: Cli) -> None:
    assert "Example: mlxtune report out" in cli("report", "--help").out


def test_text_that_acts_on_a_terminal_is_escaped(cli: Cli) -> None:
    write_run(Path("out"), options={"model_path": "models/\x1b[31mred"})
    outcome = cli("report", "out")
    assert outcome.code == 0
    assert "\\x1b[31mred" in outcome.out and "\x1b" not in outcome.out


def test_summaries_for_python(cli: Cli) -> None:
    write_run(Path("a"))
    write_run(Path("b"), epochs=4)
    found = mlxtune.report("a", Path("b"), html="page.html")
    assert [each.best_val_loss for each in found] == [1.0, 0.5]
    assert Path("page.html").exists()
    with pytest.raises(OutputError):
        mlxtune.report("none")


# At the end of a run


def test_page_that_cannot_be_made_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(Path("out"))
    warnings: list[str] = []
    assert write_page(run, warnings.append) == run / "report.html"
    assert warnings == []

    def broken(runs: object) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr("mlxtune.views.pages.run_page.render_runs", broken)
    assert write_page(run, warnings.append) is None
    assert warnings == [f"{run}/report.html: the report could not be written: RuntimeError: a bug"]


def test_page_on_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(Path("out"))
    (run / "report.html").mkdir()
    warnings: list[str] = []
    assert write_page(run, warnings.append) is None
    assert "could not be written" in warnings[0]
