"""The sections of a run's page on its rewards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mlxtune.core.run.run_folder import SAMPLE_RECORDS
from mlxtune.core.run.stored_run import read_run
from mlxtune.core.run.summary import RunView
from mlxtune.views.pages.reward_section import reward_context
from mlxtune.views.pages.run_page import evaluation_context, render_runs
from tests.runs import EVALUATION, as_lines, write_rewarded_run
from tests.views.pages.markup import HOSTILE, Page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_rewarded_run(tmp_path)


def page(run: Path) -> Page:
    return Page(render_runs([read_run(run)]))


def test_rewards_take_the_place_of_the_loss(run: Path) -> None:
    shown = page(run)
    learned = "The sum of rewards rose: 1.12 in the first third of the steps, 1.52 in the last."
    assert learned + " Rose: short.short. Fell: json." in shown.text("loss")
    assert "mean reward of answers sampled in the last third, from 1.12" in shown.text("figures")
    assert "training loss" not in shown.text("figures")
    charts = [series["name"] for series in json.loads(shown.text("charts"))[0]["series"]]
    assert charts == ["sum of rewards", "json", "short.short"]
    titles = [text.split(" ")[0] for text in shown.of("h3")]
    assert titles[0] == "Rewards"
    assert {"Spread", "Length", "Fractions", "Training", "Divergence"} <= {*titles}


def test_changes_are_in_a_table(run: Path) -> None:
    text = page(run).text("answers")
    assert "sum of rewards 1.12 1.52 ↑ rose" in text
    assert "json 0.875 0.475 ↓ fell" in text
    assert "tokens per answer 37.5 29.5 ↓ fell" in text


def test_rewards_that_moved_apart_have_examples_of_the_last_steps(run: Path) -> None:
    text = page(run).text("answers")
    assert "! short.short rose, json fell" in text
    examples = text[: text.index("Best and worst answers")]
    # Samples with a high `short` and a low `json`, which is 0 in all late samples.
    assert "step 12 Prompt 2 answer 2 brief answer 2 of step 12 json 0, short.short 1" in examples
    assert "long answer" not in examples


def test_step_shows_the_best_and_worst_answer_of_the_rows_that_differ_most(run: Path) -> None:
    shown = page(run)
    steps = [has for tag, has in shown.tags if "data-sampled" in has]
    assert [has["data-sampled"] for has in steps] == [str(step) for step in range(1, 13)]
    assert [has["data-sampled"] for has in steps if "hidden" not in has] == ["12"]
    options = [has for tag, has in shown.tags if tag == "option"]
    assert [has["value"] for has in options if "selected" in has] == ["12"]
    context = reward_context(read_run(run), RunView.of(read_run(run)))
    first, second = context["steps"][2]["groups"]
    assert (first["row"], first["note"]) == ("prompts.jsonl:2", "of 2 answers")
    assert [(each["title"], each["sample"].text) for each in first["answers"]] == [
        ("best", "brief answer 2 of step 3"),
        ("worst", "long answer 2 of step 3"),
    ]
    assert first["answers"][0]["facts"] == "json 0, short.short 1, advantage +0.50, 3 tokens"
    assert second["note"] == "all 2 rewards are equal: no gradient"


def test_page_of_long_answers_has_a_limited_size(tmp_path: Path) -> None:
    run = write_rewarded_run(tmp_path, 40, text="<&\u202e" * 40_000)
    shown = page(run)
    assert len(shown.html) < 2**20
    assert "119,000 more characters" in shown.text("answers")
    assert len([tag for tag, has in shown.tags if tag == "option"]) == 12


def test_hostile_answers_and_names_are_text(tmp_path: Path) -> None:
    run = write_rewarded_run(tmp_path, text=HOSTILE)
    metrics = {f"rewards/{HOSTILE}/mean": 0.5, f"rewards/{HOSTILE}/std": 0.5}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_bytes(as_lines([line | {"metrics": metrics} for line in lines]))
    shown = page(run)
    assert [tag for tag, _ in shown.tags if tag == "img"] == []
    assert "owned()" in shown.text("answers")
    assert shown.html.count("<script") == 2


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (None, "The run has no samples.jsonl.gz, so no samples are shown."),
        (b"not gzip", "samples.jsonl.gz cannot be read, so no samples are shown: is damaged: "),
        (b"", "Best and worst answers"),
    ],
)
def test_missing_or_damaged_record_is_a_note(run: Path, content: bytes | None, note: str) -> None:
    (run / SAMPLE_RECORDS).unlink()
    if content is not None:
        (run / SAMPLE_RECORDS).write_bytes(content)
    text = page(run).text("answers")
    assert note in text
    assert "sum of rewards 1.12" in text


def test_every_damaged_record_still_gives_a_page(run: Path) -> None:
    content, read = (run / SAMPLE_RECORDS).read_bytes(), read_run(run)
    view = RunView.of(read)
    for at in range(0, len(content), 97):
        (run / SAMPLE_RECORDS).write_bytes(
            content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :]
        )
        assert reward_context(read, view)["changes"]


def test_evaluation_of_rewards_is_a_table(run: Path) -> None:
    rewards = [
        {"name": name, "sampled": sampled, "before": 0.25, "after": 0.75, "low": 0.4, "high": 0.6}
        for name in ("", "json")
        for sampled in (False, True)
    ]
    evaluation = EVALUATION | {"rewards": rewards, "gained": [], "lost": [], "generated": None}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    text = page(run).text("evaluation")
    assert "greedy answers 0.250 0.750 +0.500 +0.400 to +0.600" in text
    assert "sampled answers: json 0.250 0.750 +0.500" in text
    # The verdict has the rewards of greedy and of sampled answers, not those of each name.
    assert page(run).text("verdict").count("+0.400 to +0.600") == 2


def test_runs_with_rewards_are_compared_by_their_mean_reward(tmp_path: Path) -> None:
    runs = [read_run(write_rewarded_run(tmp_path / name)) for name in ("a", "b")]
    other = write_rewarded_run(tmp_path / "c", options={"reward": ("json",)})
    validation = {"kind": "validation", "step": 0, "val_loss": -0.25, "val_perplexity": 1.0}
    for each in (*[run.folder for run in runs], other):
        with (each / "metrics.jsonl").open("ab") as file:
            file.write(as_lines([validation | {"step": 12, "val_loss": -0.75}]))
    a, b, c = (read_run(each) for each in (runs[0].folder, runs[1].folder, other))
    shown = Page(render_runs([a, b]))
    assert "has the highest mean reward, 0.750" in shown.text("h1")
    assert "mean reward before" in shown.text("results")
    assert "reward of sampled answers" in shown.text("results")
    assert "1.52" in shown.text("results")
    assert "loss" not in shown.text("main").lower().partition("options that differ")[0]
    (curve, _) = json.loads(shown.text("charts"))[0]["series"]
    assert curve["y"] == [0.75]
    assert "with the same rewards" in Page(render_runs([a, c])).text("verdict")


def test_run_without_an_evaluation_names_the_rewards_to_evaluate_by(tmp_path: Path) -> None:
    run = read_run(write_rewarded_run(tmp_path))
    run = dataclasses.replace(run, evaluation=None)
    command = evaluation_context(run, RunView.of(run))["eval_command"]
    assert command.endswith(" --data FILE --reward json --reward short.py:short=2")
