"""The page of a run shows all its records as text, even hostile data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.run.run import Run, read_run
from mlxtune.core.run.summary import differing_options
from mlxtune.views.pages.run_page import render_runs
from tests.runs import EVALUATION, as_lines, metrics, step_line, write_run

VOID = {"meta", "link", "input"}
HOSTILE = "</script><script>owned()</script><img src=x onerror=alert(1)>\u202e\x1b[31m"


class Page(HTMLParser):
    """The parsed elements of a page, and the text in each section; all elements must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = tag, {name: value or "" for name, value in attrs}
        self.tags.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, tag
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        names = [attributes["id"] for _, attributes in self._open if "id" in attributes]
        kind = self._open[-1][0] if self._open else ""
        for name in (*names[-1:], kind):
            self.texts[name] = f"{self.texts.get(name, '')} {data}"

    def text(self, name: str) -> str:
        return " ".join(self.texts.get(name, "").split())


def page(*runs: Run) -> Page:
    return Page(render_runs(runs))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return read_run(write_run(Path("out"), evaluation=EVALUATION))


def test_page_says_all_that_is_known(run: Run) -> None:
    found = page(run)

    assert (
        found.text("h1") == "2 epochs on chat.jsonl took tiny’s validation loss from 4.00 to 1.00"
    )
    for text in ("rank 8, alpha 16", "a machine (cpu)", "2026-03-04 05:06", "The adapter helped"):
        assert text in found.html
    evaluation = found.text("evaluation")
    for text in ("of 2 answers exact after 1", "change, 95% interval −3.20 to −2.75 −3.00"):
        assert text in evaluation
    for text in ("chat.jsonl:7", "2 + 2?", "the the", "✓ exact", "Rows that lost most", "+0.250"):
        assert text in evaluation
    plan = found.text("plan")
    for text in ("26 MB", "27 MB", "1.5 2.0", "5.0% 5.0%", "105.0% 105.0%", "24 GB"):
        assert text in plan
    data = found.text("data")
    for text in ("data/chat.jsonl", "2 skipped", "no assistant turn", "median 90 40"):
        assert text in data
    options = found.text("options")
    assert options.index("--epochs") < options.index("--rank")
    origin = found.text("origin")
    for text in ("sha256:ba5e", "sha256:da7a", "0.32.4", "llama, 2 layers", "rank 8 on 4 modules"):
        assert text in origin


def test_charts_are_of_the_loss_the_rate_the_gradient_the_speed_and_the_memory(run: Run) -> None:
    found = page(run)
    labels = [attributes["aria-label"] for tag, attributes in found.tags if tag == "svg"
            and "aria-label" in attributes]  # fmt: skip
    assert len(labels) == 5
    assert labels[0].startswith("Loss over 80 steps: training ")
    assert "validation 4.00 before, 1.00 at best" in labels[0]
    data = json.loads(found.texts["charts"])
    names = [[series["name"] for series in each["series"]] for each in data]
    assert '<line class="vertical" x1="50.00%"' in found.html, "the end of the first epoch"
    assert names[0] == ["training, each step", "training, averaged over 10", "validation"]
    assert data[0]["series"][2]["x"] == [0, 40, 80]
    assert data[0]["series"][2]["y"] == [4, 2, 1]
    assert data[0]["series"][0]["y"][:2] == [
        pytest.approx(step_line(step, 40)["loss"], rel=1e-5) for step in (1, 2)
    ]
    assert [len(each) for each in names] == [3, 1, 2, 2, 2]
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
    series = json.loads(found.texts["charts"])[0]["series"][2]
    assert (series["x"], series["y"]) == ([0, 40, 60, 80], [4, 2, 0.5, 1])
    assert "Step 60 (epoch 2) was the best." in found.html
    assert '<span class="now">best: step 60</span>' in found.html


def test_page_without_an_evaluation_says_how_to_get_one(tmp_path: Path) -> None:
    found = page(read_run(write_run(tmp_path / "out")))
    assert "mlxtune eval --model-path models/tiny --adapter" in found.text("code")
    assert "The run finished. Epoch 2 was the best." in found.html
    assert '<span class="now">best</span>' in found.html


@pytest.mark.parametrize(
    ("verdict", "text", "style"),
    [
        ("hurt", "The adapter hurt", "error"),
        ("cannot tell", "Cannot tell whether", "warning"),
    ],
)
def test_verdict_is_said_plainly(tmp_path: Path, verdict: str, text: str, style: str) -> None:
    evaluation = EVALUATION | {"verdict": verdict}
    found = page(read_run(write_run(tmp_path / "out", evaluation=evaluation)))
    assert re.search(rf'<p class="verdict {style}">[^<]*{text}', found.html)


def test_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    found = page(read_run(write_run(tmp_path / "out", finished=False)))
    assert "The run is unfinished" in found.html
    assert f"mlxtune train --resume {tmp_path / 'out'}" in found.text("code")


def test_skipped_steps_are_named_with_their_rows_and_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    rows = [f"chat.jsonl:{row}" for row in range(1, 12)]
    skipped = {"kind": "skipped", "step": 3, "epoch": 1, "learning_rate": 1e-4}
    skipped |= {"reason": "the loss is nan", "rows": rows}
    lines = [step_line(1, 9), step_line(2, 9), skipped, step_line(4, 9)]
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    found = page(read_run(folder))

    assert "1 step not applied" in found.text("skipped")
    assert "the loss is nan" in found.text("skipped")
    assert "chat.jsonl:8 and 3 more" in found.text("skipped")
    assert '<circle class="skip" cx="75.00%"' in found.html
    assert 'id="skipped"' not in page(read_run(write_run(tmp_path / "other"))).html


@pytest.mark.slow
def test_page_of_tens_of_thousands_of_steps_stays_light_and_keeps_the_spike(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "out", epochs=1, per_epoch=10)
    lines = [step_line(step, 30_000) for step in range(1, 20_001)]
    lines[12_344]["loss"] = 77.5
    (folder / "metrics.jsonl").write_bytes(as_lines(lines))
    found = page(read_run(folder))

    assert len(found.html) < 400_000
    series = json.loads(found.texts["charts"])[0]["series"][0]
    assert len(series["x"]) <= 1000
    assert dict(zip(series["x"], series["y"], strict=True))[12_345] == 77.5


def test_many_answers_are_folded_away_and_bounded(tmp_path: Path) -> None:
    generated = EVALUATION["generated"]
    assert isinstance(generated, dict)
    samples = [generated["samples"][0] | {"row": row} for row in range(1, 151)]
    evaluation = EVALUATION | {"generated": generated | {"rows": 150, "samples": samples}}
    found = page(read_run(write_run(tmp_path / "out", evaluation=evaluation)))
    assert found.html.count('<article class="sample">') == 40
    open_, _, folded = found.html.partition("37 more answers; of 150, 40 are on this page")
    assert open_.count('<article class="sample">') == 3
    assert folded.count('<article class="sample">') == 37


# Safety


def hostile(value: Any) -> Any:
    """Return the value with every text in it replaced by hostile text."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return {key: hostile(each) for key, each in value.items()} if isinstance(value, dict) else value


def test_what_files_hold_is_inert(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<script>owned()<" / "x", evaluation=EVALUATION)
    evaluation = hostile(EVALUATION) | {"verdict": "helped"}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    about = json.loads((folder / "run.json").read_text())
    options = {HOSTILE: HOSTILE, **about["config"]}
    about |= {"versions": {HOSTILE: HOSTILE}, "config": hostile(options), "device": HOSTILE}
    (folder / "run.json").write_text(json.dumps(about))
    ledgers = json.loads((folder / "ledger.json").read_text())
    ledgers[0] |= {"path": HOSTILE, "rows_skipped": {HOSTILE: 2}}
    (folder / "ledger.json").write_text(json.dumps(ledgers))
    skipped = {"kind": "skipped", "step": 1, "reason": HOSTILE, "rows": [HOSTILE]}
    (folder / "metrics.jsonl").write_bytes(as_lines([skipped, step_line(2, 9)]))
    run = read_run(folder)

    for html in (render_runs([run]), render_runs([run, run])):
        assert html.count("<script") == 2
        assert html.count("</script>") == 2
        assert "<img" not in html
        assert "\u202e" not in html
        assert "\x1b" not in html
        assert "&lt;script&gt;owned()" in html
        found = Page(html)
        # No attribute runs a script or loads a file.
        assert not [n for _, attributes in found.tags for n in attributes if n.startswith("on")]
        loads = {"src", "srcset", "action", "formaction", "poster", "data", "background", "style"}
        assert not [name for _, attributes in found.tags for name in attributes if name in loads]


def test_policy_allows_nothing_but_its_own_script_and_style(run: Run) -> None:
    found = page(run)
    policy = next(a["content"] for t, a in found.tags if t == "meta" and "http-equiv" in a)

    def digest(tag: str) -> str:
        element = re.findall(rf"<{tag}>(.*?)</{tag}>", found.html, re.DOTALL)
        assert len(element) == 1
        return base64.b64encode(hashlib.sha256(element[0].encode()).digest()).decode()

    assert policy.startswith("default-src 'none'; ")
    assert f"style-src 'sha256-{digest('style')}'" in policy
    assert f"script-src 'sha256-{digest('script')}'" in policy
    assert "unsafe" not in policy
    assert "http:" not in policy


def test_colours_of_text_stand_out_from_what_is_behind_them() -> None:
    """WCAG 2.1, 1.4.3 and 1.4.11, require a contrast of 4.5 for text and 3 for curves."""
    from importlib import resources

    folder = resources.files("mlxtune.views.pages") / "templates"
    style = "".join(folder.joinpath(f).read_text() for f in ("page.css", "run_page.css"))
    found = dict(re.findall(r"--([\w-]+): light-dark\((#\w+, #\w+)\);", style))

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str, theme: int) -> float:
        pair = [luminance(found[name].split(", ")[theme]) for name in (one, other)]
        return (max(pair) + 0.05) / (min(pair) + 0.05)

    for theme in (0, 1):
        for text in ("ink", "muted", "learned", "warning", "error"):
            assert contrast(text, "card", theme) >= 4.5, (text, theme)
        for curve in ("learned-line", "val", *(f"c{i}" for i in range(8))):
            assert contrast(curve, "card", theme) >= 3, (curve, theme)


# Several runs


def test_comparison_has_results_options_that_differ_and_all_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [
        read_run(write_run(Path("a"), epochs=2)),
        read_run(write_run(Path("b"), epochs=4, options={"lr": 5e-3})),
        read_run(write_run(Path("c"), epochs=3, finished=False)),
    ]
    found = page(*runs)

    assert found.text("h1") == "Of 3 runs, b has the lowest validation loss, 0.500"
    results = found.text("results")
    for text in ("0.500 best", "100/120 unfinished", "27 MB", "2,000", "16.0s"):
        assert text in results
    assert "--lr 0.0001 0.005 0.0001" in found.text("differences")
    assert "--epochs 2 4 3" in found.text("differences")
    data = json.loads(found.texts["charts"])
    assert [[each["name"] for each in chart["series"]] for chart in data] == [["a", "b", "c"]] * 6
    assert [each["run"] for each in data[0]["series"]] == [0, 1, 2]
    boxes = [a["value"] for t, a in found.tags if t == "input" and a["type"] == "checkbox"]
    assert boxes == ["0", "1", "2"]
    assert "not validated on the same rows" not in found.html


def test_runs_that_were_judged_by_other_rows_are_not_compared_in_silence(tmp_path: Path) -> None:
    same = read_run(write_run(tmp_path / "a"))
    seed = read_run(write_run(tmp_path / "b", options={"seed": 7}))
    data = read_run(write_run(tmp_path / "c", about={"validation_hash": "sha256:other"}))
    none = read_run(write_run(tmp_path / "d", validation=False))
    for other, differs in ((seed, True), (data, True), (none, False)):
        found = page(same, other)
        assert ("not validated on the same rows" in found.html) is differs
        assert (found.text("h1") == "2 runs side by side, validated on different rows") is differs
        assert ("1.00 best" in found.text("results")) is not differs

    # The seed does not select the rows of a validation file.
    file = {"validation_hash": "sha256:file"}
    first, second = (
        read_run(write_run(tmp_path / name, options={"seed": seed}, about=file))
        for seed, name in enumerate("ef")
    )
    assert "not validated on the same rows" not in page(first, second).html


def test_same_model_by_another_path_is_the_same_model(tmp_path: Path) -> None:
    first = read_run(write_run(tmp_path / "a"))
    moved = read_run(write_run(tmp_path / "b", options={"model_path": "/elsewhere/tiny"}))
    assert differing_options([first, moved]) == {}
    moved.metadata = {"base_hash": "sha256:other"}
    assert "--model-path" in differing_options([first, moved])


def test_more_runs_than_colours_are_told_apart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", epochs=1, per_epoch=5))
    found = page(*[run] * 10)
    styles = {a["class"] for t, a in found.tags if "run" in a.get("class", "").split()}
    assert len(styles) == 10


def test_comparison_of_runs_without_anything_in_common_is_a_page(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_bytes(b"")
    found = page(read_run(empty), read_run(write_run(tmp_path / "a", validation=False)))
    assert found.text("h1") == "2 runs side by side"


def test_metrics_of_the_fixture_are_those_of_a_run() -> None:
    from mlxtune.core.run.progress import Progress

    assert Progress.from_jsonl(as_lines(metrics(2, 5))).step == 10


def test_options_of_any_type_are_compared(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name)) for name in ("one", "other")]
    for run in runs:
        run.about = {**run.about, "config": {**run.config, "val_split": [0.2]}}
    assert "2 runs" in render_runs(runs)
