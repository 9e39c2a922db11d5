"""The page of one run, the comparison of several, and the card of a run in a notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.run.stored_run import Run, read_run
from mlxtune.views.pages.run_page import ResultCard, render_runs
from tests.runs import EVALUATION, as_lines, metrics, step_line, write_run
from tests.views.pages.markup import Page

CODE = "generate(model_path='<b>', prompt='…')"
HEADLINE = "2 epochs on chat.jsonl took tiny’s validation loss from 4.00 to 1.00"


def written(folder: Path, **changes: Any) -> Run:
    return read_run(write_run(folder, **changes))


def page(*runs: Run) -> Page:
    return Page(render_runs(runs))


def charts(page: Page) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(page.text("charts"))
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return written(Path("out"), evaluation=EVALUATION)


@pytest.mark.parametrize(
    ("section", "texts"),
    [
        ("header", ("rank 8, alpha 16", "a machine (cpu)", "2026-03-04 05:06")),
        ("verdict", ("✓ The adapter helped",)),
        ("evaluation", ("of 2 answers exact after 1", "change, 95% interval −3.20 to −2.75 −3.00")),
        ("evaluation", ("chat.jsonl:7", "2 + 2?", "the the", "✓ exact", "Rows that lost most")),
        ("plan", ("26 MB 27 MB", "1.5 2.0", "5.0% 5.0%", "105.0% 105.0%", "24 GB")),
        ("data", ("data/chat.jsonl", "2 skipped", "no assistant turn", "median 90 40")),
        ("origin", ("sha256:ba5e", "sha256:da7a", "0.32.4", "llama, 2 layers", "rank 8 on 4")),
    ],
)
def test_section_shows_the_runs_records(run: Run, section: str, texts: tuple[str, ...]) -> None:
    found = page(run)
    assert found.text("h1") == HEADLINE
    assert [text for text in texts if text not in found.text(section)] == []
    assert found.text("options").index("--epochs") < found.text("options").index("--rank")


def test_charts_show_loss_learning_rate_gradient_speed_and_memory(run: Run) -> None:
    found = page(run)
    labels = [has["aria-label"] for tag, has in found.tags if tag == "svg" and "aria-label" in has]
    assert len(labels) == 5
    assert labels[0].startswith("Loss over 80 steps: training ")
    assert "validation 4.00 before, 1.00 at best" in labels[0]
    data = charts(found)
    names = [[series["name"] for series in each["series"]] for each in data]
    assert '<line class="vertical" x1="50.00%"' in found.html, "the end of the first epoch"
    assert names[0] == ["training, each step", "training, averaged over 10", "validation"]
    assert data[0]["series"][2]["x"] == [0, 40, 80]
    assert data[0]["series"][2]["y"] == [4, 2, 1]
    assert data[0]["series"][0]["y"][:2] == [
        pytest.approx(step_line(step, 40)["loss"], rel=1e-5) for step in (1, 2)
    ]
    assert [len(name) for name in names] == [3, 1, 2, 2, 2]
    each, highest = (series["y"] for series in data[4]["series"])
    assert each[:3] == pytest.approx([20.001, 20.002, 20.003])
    assert highest == pytest.approx([max(each[: i + 1]) for i in range(80)])


def test_best_validation_within_an_epoch_is_drawn_and_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    records = metrics(2, 40)
    within = {"kind": "validation", "step": 60, "val_loss": 0.5, "val_perplexity": 1.6}
    records.insert(records.index(step_line(60, 40)) + 1, within)
    (folder / "metrics.jsonl").write_bytes(as_lines(records))
    found = page(read_run(folder))

    assert "validation 4.00 before, 0.500 at best" in found.html
    series = charts(found)[0]["series"][2]
    assert (series["x"], series["y"]) == ([0, 40, 60, 80], [4, 2, 0.5, 1])
    assert "Step 60 (epoch 2) was the best." in found.html
    assert '<span class="now">best: step 60</span>' in found.html


def test_run_without_evaluation_shows_the_command_that_evaluates(tmp_path: Path) -> None:
    found = page(written(tmp_path / "out"))
    assert "mlxtune eval --model-path models/tiny --adapter" in found.text("code")
    assert "✓ The run finished. Epoch 2 was the best." in found.text("verdict")
    assert '<span class="now">best</span>' in found.html


@pytest.mark.parametrize(
    ("changes", "text", "style"),
    [
        ({"verdict": "hurt"}, "✕ The adapter hurt", "error"),
        ({"verdict": "hurt", "hardly": True}, "✕ The adapter hardly hurt", "error"),
        ({"verdict": "cannot tell"}, "! Cannot tell whether", "warning"),
        ({"hardly": True}, "! The adapter hardly helped", "warning"),
    ],
)
def test_verdict_has_its_sign_and_style(
    tmp_path: Path, changes: dict[str, Any], text: str, style: str
) -> None:
    found = page(written(tmp_path / "out", evaluation=EVALUATION | changes))
    assert f'<p class="verdict {style}">{text}' in found.html


def test_unfinished_run_shows_the_command_that_resumes(tmp_path: Path) -> None:
    found = page(written(tmp_path / "out", finished=False))
    assert "! The run is unfinished" in found.text("verdict")
    assert f"mlxtune train --resume {tmp_path / 'out'}" in found.text("code")


def test_skipped_steps_are_listed_with_their_rows_and_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    rows = [f"chat.jsonl:{row}" for row in range(1, 12)]
    skipped = {"kind": "skipped", "step": 3, "epoch": 1, "learning_rate": 1e-4}
    skipped |= {"reason": "the loss is nan", "rows": rows}
    lines = [step_line(1, 9), step_line(2, 9), skipped, step_line(4, 9)]
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    found = page(read_run(folder))

    for text in ("1 step not applied", "the loss is nan", "chat.jsonl:8 and 3 more"):
        assert text in found.text("skipped")
    assert '<circle class="skip" cx="75.00%"' in found.html
    assert 'id="skipped"' not in page(written(tmp_path / "other")).html


@pytest.mark.slow
def test_page_of_20_000_steps_stays_small_and_keeps_spikes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", epochs=1, per_epoch=10)
    lines = [step_line(step, 30_000) for step in range(1, 20_001)]
    lines[12_344]["loss"] = 77.5
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    found = page(read_run(folder))

    assert len(found.html) < 400_000
    series = charts(found)[0]["series"][0]
    assert len(series["x"]) <= 1000
    assert dict(zip(series["x"], series["y"], strict=True))[12_345] == 77.5


def test_samples_beyond_three_are_folded_and_beyond_forty_left_out(tmp_path: Path) -> None:
    generated: Any = EVALUATION["generated"]
    samples = [generated["samples"][0] | {"row": row} for row in range(1, 151)]
    evaluation = EVALUATION | {"generated": generated | {"rows": 150, "samples": samples}}
    found = page(written(tmp_path / "out", evaluation=evaluation))
    shown, _, folded = found.html.partition("37 more answers; of 150, 40 are on this page")
    assert shown.count('<article class="sample">') == 3
    assert folded.count('<article class="sample">') == 37


# Several runs


def test_comparison_shows_results_differing_options_and_all_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = page(
        written(Path("a"), epochs=2),
        written(Path("b"), epochs=4, options={"lr": 5e-3}),
        written(Path("c"), epochs=3, finished=False),
    )

    assert found.text("h1") == "Of 3 runs, b has the lowest validation loss, 0.500"
    for text in ("0.500 best", "100/120 unfinished", "27 MB", "2,000", "16.0s"):
        assert text in found.text("results")
    assert "--lr 0.0001 0.005 0.0001" in found.text("differences")
    assert "--epochs 2 4 3" in found.text("differences")
    data = charts(found)
    assert [[each["name"] for each in chart["series"]] for chart in data] == [["a", "b", "c"]] * 6
    assert [each["run"] for each in data[0]["series"]] == [0, 1, 2]
    boxes = [a["value"] for t, a in found.tags if t == "input" and a["type"] == "checkbox"]
    assert boxes == ["0", "1", "2"]


def test_comparison_shows_verdicts_and_exact_answers(tmp_path: Path) -> None:
    judged = written(tmp_path / "a", evaluation=EVALUATION)
    found = page(judged, written(tmp_path / "b"))
    labels = [a.get("data-label") for t, a in found.tags if t == "td" and "data-label" in a]
    assert labels[:4] == [
        *("validation loss before", "validation loss at best", "verdict", "exact answers")
    ]
    assert "helped 1 of 2" in found.text("results")
    assert "– –" in found.text("results")


def test_runs_validated_on_different_rows_are_not_compared(tmp_path: Path) -> None:
    same = written(tmp_path / "a")
    # The seed does not select the rows of a validation file.
    file = {"validation_hash": "sha256:file"}
    first, second = (
        written(tmp_path / name, options={"seed": seed}, about=file)
        for seed, name in enumerate("ef")
    )
    odd = written(tmp_path / "g")
    odd.about = {**odd.about, "config": {**odd.config, "val_split": [0.2]}}
    for one, other, differs in (
        (same, written(tmp_path / "b", options={"seed": 7}), True),
        (same, written(tmp_path / "c", about={"validation_hash": "sha256:other"}), True),
        (same, written(tmp_path / "d", validation=False), False),
        (first, second, False),
        (odd, odd, False),
    ):
        found = page(one, other)
        assert ("! The runs were not validated on the same rows" in found.html) is differs
        assert (found.text("h1") == "2 runs side by side, validated on different rows") is differs
        assert ("1.00 best" in found.text("results")) is not differs


def test_more_runs_than_colors_have_different_styles(tmp_path: Path) -> None:
    found = page(*[written(tmp_path / "a", epochs=1, per_epoch=5)] * 10)
    styles = {a["class"] for t, a in found.tags if "run" in a.get("class", "").split()}
    assert len(styles) == 10


def test_run_without_metrics_is_compared(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_bytes(b"")
    found = page(read_run(empty), written(tmp_path / "a", validation=False))
    assert found.text("h1") == "2 runs side by side"


def test_evaluation_shows_the_losses_that_its_change_compares(tmp_path: Path) -> None:
    difference = EVALUATION["difference"] | {"loss": 0.5, "low": 0.25, "high": 0.75}
    start = {"start": {"loss": 0.5, "perplexity": 1.65}, "base_difference": difference}
    evaluation = EVALUATION | {"verdict": "hurt", "difference": difference} | start
    found = page(written(tmp_path, evaluation=evaluation)).text("evaluation")
    figures = "loss of the first adapter 0.500 loss with the adapter 1.00 change"
    assert figures in found
    assert "interval +0.250 to +0.750 +0.500" in found


# In a notebook


def test_card_shows_curves_verdict_losses_and_code(tmp_path: Path) -> None:
    card = ResultCard(written(tmp_path, evaluation=EVALUATION), CODE)
    html = card.html()
    assert len(re.findall(r'<path class="(?:faint|line) (?:train|val)"', html)) == 3
    assert f"{HEADLINE}." in html
    assert "✓ The adapter helped: it takes 75% off the loss of the base model" in html
    assert "<dt>best validation loss, from 4.00 before training</dt><dd>1.00</dd>" in html
    assert "generate(model_path=&#39;&lt;b&gt;&#39;, prompt=&#39;…&#39;)" in html

    headline, verdict, *numbers, code = card.text().split("\n")
    assert headline == f"{HEADLINE}."
    assert verdict.startswith("✓ The adapter helped: ")
    assert "1.00  best validation loss, from 4.00 before training" in numbers
    assert code == CODE

    bare = ResultCard(written(tmp_path / "bare", validation=False), CODE)
    assert "training loss in the last epoch" in bare.html()


def test_card_loads_nothing_and_styles_only_itself(tmp_path: Path) -> None:
    html = ResultCard(written(tmp_path, evaluation=EVALUATION), CODE).html()
    assert not re.search(r"<script|<link|https?:|url\(", html)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    inside = style.strip().removeprefix(".mlxtune-run.mlxtune-run {").removesuffix("}")
    depth = 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0, "a rule that is not nested"
    assert depth == 0
