"""The card of a run in a notebook: the numbers of its record, and its curve."""

from __future__ import annotations

import re
from pathlib import Path

from mlxtune.core.run.run import Run, read_run
from mlxtune.views.pages.run_page import ResultCard
from tests import runs

CODE = "generate(model_path='<b>', prompt='…')"


def finished(folder: Path, **options: bool) -> Run:
    return read_run(runs.write_run(folder, evaluation=runs.EVALUATION, **options))


def test_card_has_the_curves_the_verdict_the_losses_and_the_code(tmp_path: Path) -> None:
    html = ResultCard(finished(tmp_path), CODE).html()
    assert len(re.findall(r'<path class="(?:faint|line) (?:train|val)"', html)) == 3
    assert "2 epochs on chat.jsonl took tiny’s validation loss from 4.00 to 1.00." in html
    assert "The adapter helped: it takes 75% off the loss of the base model" in html
    assert "<dt>best validation loss, from 4.00 before training</dt><dd>1.00</dd>" in html
    assert "generate(model_path=&#39;&lt;b&gt;&#39;, prompt=&#39;…&#39;)" in html


def test_text_has_all_but_the_curves(tmp_path: Path) -> None:
    first, verdict, *numbers, code = ResultCard(finished(tmp_path), CODE).text().split("\n")
    assert first == "2 epochs on chat.jsonl took tiny’s validation loss from 4.00 to 1.00."
    assert verdict.startswith("✓ The adapter helped: ")
    assert "1.00  best validation loss, from 4.00 before training" in numbers
    assert code == CODE


def test_card_loads_nothing_and_its_style_touches_nothing_else_of_a_notebook(
    tmp_path: Path,
) -> None:
    html = ResultCard(finished(tmp_path), CODE).html()
    assert not re.search(r"<script|<link|https?:|url\(", html)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    inside = style.strip().removeprefix(".mlxtune-run.mlxtune-run {").removesuffix("}")
    depth = 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0, "a rule that is not nested"
    assert depth == 0


def test_run_without_validation_has_a_card(tmp_path: Path) -> None:
    run = read_run(runs.write_run(tmp_path, validation=False))
    assert "training loss in the last epoch" in ResultCard(run, CODE).html()
