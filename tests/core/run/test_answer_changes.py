"""How rewards and answers changed in the course of a run, with numbers computed by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mlxtune.config import TrainConfig
from mlxtune.core.run.sampled_answers import (
    MetricChange,
    gradient_warning,
    metric_changes,
    opposites,
    reward_keys,
)
from mlxtune.core.run.stored_run import Run, read_run
from mlxtune.core.run.summary import RunView
from mlxtune.views.run_text import summary_lines
from tests.runs import as_lines, step_line, write_rewarded_run, write_run

EQUAL = "all answers got the same reward"


def changed(folder: Path, values: dict[str, list[float]], reward: tuple[str, ...]) -> Run:
    run = write_run(folder, options={"objective": "grpo", "reward": reward})
    names, rows = list(values), zip(*values.values(), strict=True)
    lines = [
        step_line(step, 40, metrics=dict(zip(names, row, strict=True)))
        for step, row in enumerate(rows, start=1)
    ]
    (run / "metrics.jsonl").write_bytes(as_lines(lines))
    return read_run(run)


def test_thirds_are_compared_by_name(tmp_path: Path) -> None:
    by_name = {each.name: each for each in metric_changes(read_run(write_rewarded_run(tmp_path)))}
    # Steps 1 to 4 of 12, and steps 9 to 12.
    found = {name: (round(x.first, 6), round(x.last, 6), x.moved) for name, x in by_name.items()}
    assert found == {
        "sum of rewards": (1.125, 1.525, 1),
        "json": (0.875, 0.475, -1),
        "short.short": (0.125, 0.525, 1),
        "tokens per answer": (37.5, 29.5, -1),
        "fraction of truncated answers": (0.25, 0.25, 0),
        "fraction of rows with equal rewards": (0.5, 0.5, 0),
        "divergence from the start (KL)": (0.025, 0.105, 1),
    }
    assert by_name["json"].texts == ["0.875", "0.475"]
    assert by_name["fraction of truncated answers"].texts == ["25.0%", "25.0%"]
    assert by_name["json"].sentence == (
        "json fell: 0.875 in the first third of the steps, 0.475 in the last"
    )


@pytest.mark.parametrize(
    ("last", "moved"),
    # The means of three steps with a variance of 1 have a standard error of sqrt(2 / 3) = 0.8165
    # for their difference.
    [(1.62, 0), (1.65, 1), (-1.62, 0), (-1.65, -1)],
)
def test_change_within_the_noise_of_steps_is_not_clear(
    tmp_path: Path, last: float, moved: int
) -> None:
    values = [-1.0, 0.0, 1.0, 9.0, 9.0, 9.0, last - 1, last, last + 1]
    run = changed(tmp_path, {"rewards/json/mean": values}, ("json",))
    (change,) = metric_changes(run)
    assert (change.name, change.kind, change.moved) == ("json", "reward", moved)


def test_updates_on_the_same_answers_count_once(tmp_path: Path) -> None:
    """Repeated values would make the noise of steps seem smaller than it is."""
    values = [-1.0, 0.0, 1.0, 9.0, 9.0, 9.0, 0.5, 1.5, 2.5]
    repeated = [value for value in values for _ in range(4)]
    run = changed(tmp_path, {"rewards/json/mean": repeated}, ("json",))
    (alone,) = metric_changes(run)
    run.about = {"config": {**run.config, "updates": 4}}
    (together,) = metric_changes(run)
    assert (alone.moved, together.moved) == (1, 0)
    assert (together.first, together.last) == (0, 1.5)


def test_rounding_does_not_count_as_a_change(tmp_path: Path) -> None:
    values = [0.1] * 3 + [0.0] * 3 + [0.1 + 1e-15] * 3
    run = changed(tmp_path, {"rewards/json/mean": values}, ("json",))
    assert [each.moved for each in metric_changes(run)] == [0]


def test_opposites_are_rewards_that_got_better_and_worse(tmp_path: Path) -> None:
    up, down = [float(n) for n in range(9)], [float(-n) for n in range(9)]
    values = {"reward": up, "rewards/a.f/mean": up, "rewards/b.f/mean": down}
    values |= {"rewards/c.f/mean": down, "completions/mean_length": down}
    weights = {"--": ("a.py:f", "b.py:f=2", "c.py:f=-0.5e-3"), "other": ("a.py:f",)}
    found: dict[str, Any] = {}
    for name, reward in weights.items():
        run = changed(tmp_path / name, values, reward)
        assert list(reward_keys(run)) == ["sum of rewards", "a.f", "b.f", "c.f"]
        pairs = opposites(metric_changes(run))
        found[name] = [(better.name, worse.name) for better, worse in pairs]
    # A penalty that falls got better. Options that do not fit the metrics have no weights.
    assert found == {
        "--": [("a.f", "b.f"), ("c.f", "b.f")],
        "other": [("a.f", "b.f"), ("a.f", "c.f")],
    }


def test_short_run_or_another_objective_has_no_changes(tmp_path: Path) -> None:
    values = {"rewards/json/mean": [float(n) for n in range(8)]}
    assert metric_changes(changed(tmp_path / "short", values, ("json",))) == []
    run = read_run(write_rewarded_run(tmp_path / "dpo"))
    run.about = {"config": {**run.config, "objective": "dpo"}}
    assert metric_changes(run) == []


def test_rows_that_teach_nothing_are_reported_if_they_are_most() -> None:
    def fractions(equal: float, masked: float) -> list[MetricChange]:
        return [
            MetricChange("fraction of rows with equal rewards", 0.0, equal, 1, "answers"),
            MetricChange("fraction of rows whose answers are masked", 0.0, masked, 1, "answers"),
        ]

    assert list(gradient_warning(fractions(0.25, 0.25))) == []
    (text,) = gradient_warning(fractions(0.75, 0.0))
    assert "75% of the rows taught nothing, because all answers got the same reward" in text
    (text,) = gradient_warning(fractions(0.25, 0.5))
    assert "50% of the rows taught nothing, because the answers that would teach were" in text


@pytest.mark.parametrize(
    ("unrewarded", "masked", "fraction", "reason", "remedy"),
    [
        (None, None, "100%", EQUAL, "partial credit"),
        (0.25, None, "75%", EQUAL, "partial credit"),
        (0.25, 0.3, "45%", EQUAL, "partial credit"),
        (0.75, None, "75%", "no answer had a reward", "fix the reward"),
        (1.0, None, "100%", "no answer had a reward", "fix the reward"),
        (None, 0.7, "70%", "the answers that would teach were truncated", "max-new-tokens"),
        (None, 1.0, "100%", "the answers that would teach were truncated", "max-new-tokens"),
    ],
)
def test_every_text_names_the_main_reason_for_rows_without_a_gradient(
    tmp_path: Path,
    unrewarded: float | None,
    masked: float | None,
    fraction: str,
    reason: str,
    remedy: str,
) -> None:
    """Steps without the metrics of a reason, as most are, have no such rows."""
    values = {"rewards/json/mean": [1.0] * 12, "frac_reward_zero_std": [1 - (masked or 0.0)] * 12}
    for name, each in (("frac_without_reward", unrewarded), ("frac_masked", masked)):
        if each is not None:
            values[name] = [each] * 12
    run = changed(tmp_path, values, ("json",))
    view = RunView.of(run)
    (warning,) = gradient_warning(view.changes)
    assert warning.endswith(f"{fraction} of the rows taught nothing, because {reason}")
    config = TrainConfig("m", ("d",), objective="grpo", reward=("json",))
    view = dataclasses.replace(view, initial_val_loss=None, best_val_loss=None)
    is_equal = "same" in reason
    texts = [
        view.verdict.text,
        next(line for line in summary_lines(view, config) if "nothing was learned" in line),
    ]
    for text in map(str.lower, texts):
        assert remedy in text
        assert ("all answers to each prompt got the same reward" in text) is is_equal
        assert (f"for {fraction} of the rows, {reason}" in text) is not is_equal
    ends = {"same": "got equal rewards", "no ": "got no reward", "would": "were truncated"}
    (end,) = (end for word, end in ends.items() if word in reason)
    assert view.headline.endswith(f"its answers {end}")


def test_steps_without_the_metric_have_no_row_without_a_reward(tmp_path: Path) -> None:
    run = changed(tmp_path, {"frac_reward_zero_std": [1.0] * 2}, ("json",))
    run.progress.steps.metrics[0]["frac_without_reward"] = 0.5
    nothing = RunView.of(run).taught_nothing
    assert nothing is not None and nothing.fraction == 0.75


def test_damaged_metrics_have_no_changes(tmp_path: Path) -> None:
    run = write_rewarded_run(tmp_path)
    about = json.loads((run / "run.json").read_text())
    about["config"]["reward"] = {"no": "list"}
    (run / "run.json").write_text(json.dumps(about))
    assert len(metric_changes(read_run(run))) == 7
    (run / "metrics.jsonl").write_text("{}\n")
    assert metric_changes(read_run(run)) == []


def test_length_of_answers_is_never_shown_as_a_reward(tmp_path: Path) -> None:
    lengths = {"completions/mean_length": [27.0] * 12, "completions/without_reward": [1.0] * 12}
    run = changed(tmp_path, lengths, ("json",))
    view = RunView.of(run)
    assert [each.kind for each in view.changes] == ["answers", "answers"]
    assert view.reward_change is None
    assert "reward of sampled answers" not in view.headline


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize("steps", [2, 12])
def test_run_without_a_gradient_has_no_success(
    tmp_path: Path, steps: int, validation: bool
) -> None:
    """The last step decides: with one row of different rewards, the run taught something."""
    for last, nothing in ((1.0, True), (0.5, False)):
        options = {"objective": "grpo", "reward": ("json",)}
        folder = tmp_path / str(nothing)
        run = write_run(folder, options=options, validation=False, evaluation={})
        lines = [
            step_line(step, 40, metrics={"frac_reward_zero_std": 1.0 if step < steps else last})
            for step in range(1, steps + 1)
        ]
        equal = [
            {"kind": "validation", "step": step, "val_loss": 0.0, "val_perplexity": 1.0}
            for step in (0, steps)
        ]
        (run / "metrics.jsonl").write_bytes(as_lines([*lines, *(equal if validation else ())]))
        view = RunView.of(read_run(run))
        assert view.finished and bool(view.taught_nothing) is nothing
        assert "taught_nothing" not in view.as_dict()
        assert ("taught tiny nothing" in view.headline) is nothing
        assert (view.verdict.outcome == "uncertain") is (nothing or validation)
        assert ("so nothing was learned" in view.verdict.text) is nothing
