"""The texts of a run, word for word."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxtune.config import InstructTrainingConfig, TrainConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.data.findings import Finding, Place
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.evaluation.outcome import PreferenceDifference, RewardChange
from mlxtune.core.run.metrics import (
    InstructEpochMetrics,
    InstructTrainResult,
    StepRecord,
    ValidationRecord,
)
from mlxtune.core.run.profile import Phase, StepProfile
from mlxtune.core.run.progress import Progress, Record
from mlxtune.core.run.sampled_answers import MetricChange, NoGradient
from mlxtune.core.run.stored_run import Run, read_run
from mlxtune.core.run.summary import RunView
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.views import run_text
from tests.core.evaluation.evaluations import evaluated
from tests.core.training.fake_pipeline import FakePipeline
from tests.core.training.records import epoch_metrics, step_record
from tests.runs import write_rewarded_run

CONFIG = TrainConfig("data/my model", ("chat.jsonl",), output="out", lr=0.05)


def record(step: int, **changes: Any) -> StepRecord:
    values = {"loss": 2.34567, "grad_norm": 0.98765, "tokens": 3000, "supervised_tokens": 1000}
    return step_record(step, **values | {"seconds": 0.5} | changes)


def epoch(number: int, val_loss: float | None) -> InstructEpochMetrics:
    return epoch_metrics(number, val_loss, epoch_time_ms=65_000, samples_per_sec=12.34)


def test_loss_is_shown_with_perplexity() -> None:
    assert run_text.loss_and_perplexity(2.0) == "2.0000 (perplexity 7.389)"
    assert run_text.loss_and_perplexity(100.0) == "100.0000 (perplexity over 1,000,000)"


@pytest.mark.parametrize(
    ("ledger", "rows", "tokens"),
    [
        (
            Ledger(
                **{"path": "chat.jsonl", "rows_read": 1010, "rows_train": 800},
                **{"rows_validation": 200, "rows_truncated": 1, "tokens": 50_000},
                rows_skipped=Counter({"no assistant turn": 7, "not valid JSON": 3}),
                **{"tokens_supervised": 20_000, "tokens_context": 29_000, "tokens_truncated": 1000},
            ),
            "chat.jsonl: 1,010 rows read, 800 for training, 200 for validation, 10 skipped (no "
            "assistant turn: "
            "7, not valid JSON: 3)",
            "50,000 tokens = 20,000 supervised + 29,000 context + 1,000 truncated from 1 row",
        ),
        (
            Ledger("chat.jsonl", 1, 1, tokens=9, tokens_supervised=3, tokens_context=6),
            "chat.jsonl: 1 row read, 1 for training",
            "9 tokens = 3 supervised + 6 context + 0 truncated",
        ),
        (
            Ledger("a", 3, 1, 1, Counter(b=1), examples=3, tokens=9, tokens_context=9),
            "a: 3 rows read, 1 for training, 1 for validation, 1 skipped (b: 1)",
            "9 tokens in 3 examples = 0 supervised + 9 context + 0 truncated",
        ),
    ],
)
def test_ledger_accounts_for_all_rows_and_tokens(ledger: Ledger, rows: str, tokens: str) -> None:
    assert ledger.adds_up()
    assert run_text.rows_line(ledger) == rows
    assert run_text.tokens_line(ledger) == tokens


@pytest.mark.parametrize(
    ("rows", "detail", "text"),
    [
        (1, "", "a.jsonl:7: looks odd: mend it"),
        (2, "message 3", "a.jsonl:7: looks odd (message 3), and 1 more: mend it"),
        (1235, "", "a.jsonl:7: looks odd, and 1,234 more: mend it"),
    ],
)
def test_finding_names_the_first_row_and_counts_the_others(
    rows: int, detail: str, text: str
) -> None:
    places = (Place("a.jsonl", 7, detail), Place("b.jsonl", 1))[:rows]
    assert run_text.finding_line(Finding("warning", "looks odd", rows, "mend it", places)) == text


def test_step_shows_loss_speed_and_memory() -> None:
    state = run_text.step_state(record(10), average=2.5, peak_gb=3.456)
    assert state == "loss 2.500  6,000 tok/s  3.46 GB"
    assert run_text.step_state(record(10), 2.5, 3.456, "serious") == f"{state}  thermal: serious"
    assert run_text.step_line(record(10), total_steps=100, average=2.5, peak_gb=3.456) == (
        "step 10/100  loss 2.3457  average 2.5000  lr 0.0001  grad norm 0.988  "
        "6,000 tokens/s  peak 3.46 GB"
    )
    # The clock may show equal times before and after a step.
    assert "tokens/s" in run_text.step_line(record(1, seconds=0.0), 1, 2.5, 0.0)


def test_epoch_shows_losses_and_whether_it_is_the_best() -> None:
    assert run_text.epoch_line(epoch(2, val_loss=1.0), best=True) == (
        "epoch 2: train 2.0000, validation 1.0000 (perplexity 2.718), best so far; "
        "12.3 rows/s, 1m 05s"
    )
    assert "best" not in run_text.epoch_line(epoch(2, val_loss=1.0), best=False)
    assert run_text.epoch_line(epoch(2, val_loss=None), best=False) == (
        "epoch 2: train 2.0000; 12.3 rows/s, 1m 05s"
    )


def test_validation_shows_its_step_as_a_fraction_of_an_epoch() -> None:
    assert run_text.validation_line(10, 1 / 3, 1.0, best=True) == (
        "step 10 (epoch 0.33): 1.0000 (perplexity 2.718), best so far"
    )
    assert run_text.validation_line(10, 1 / 3, 1.0, best=False).endswith("2.718)")


def test_plan_shows_steps_rows_and_learning_rate() -> None:
    tokens, mask = np.array([1, 2], dtype=np.int32), np.array([0, 1], dtype=np.uint8)
    corpus = [Example(row, tokens, mask) for row in range(1, 11)]
    config = InstructTrainingConfig(epochs=2, batch_size=3, seed=7, learning_rate=3e-4)

    def plan(validation: list[Example], **changes: int) -> str:
        own = dataclasses.replace(config, **changes)
        trainer = InstructTrainer(FakePipeline(), corpus, own, validation=validation)
        return run_text.plan_line(trainer)

    assert plan([]) == (
        "8 steps of 3 rows, 2 epochs; 10 training rows, no validation; learning rate 0.0003, "
        "warmup-cosine; seed 7"
    )
    assert "10 training rows, 3 for validation;" in plan(corpus[:3])
    assert "3 for validation every 2 steps;" in plan(corpus[:3], val_steps=2)
    assert plan([], val_steps=2) == plan([])


def test_added_template_is_noted_as_unused_by_mlx_lm() -> None:
    plain, added = (run_text.template_line("t", CONFIG, added=each) for each in (False, True))
    assert added == f"{plain}; mlx-lm uses the template with a fused model, not with the adapter"


def summary(
    folder: Path, *val_losses: float | None, within: float | None = None, early: bool = False
) -> list[str]:
    """Return a run's summary, with one step per epoch; `within` replaces the first epoch's loss."""
    records: list[Record] = [] if None in val_losses else [ValidationRecord(0, 3.0, 20.0)]
    for number, loss in enumerate(val_losses, start=1):
        records.append(record(number, epoch=number, tokens=2000, rows=3, seconds=1.0))
        if loss is not None:
            first = loss if within is None or number > 1 else within
            records.append(ValidationRecord(number, first, 7.0))
        records.append(epoch(number, loss))
    about = {"plan": {"memory": {"peak": 2 * 10**9}}}
    ended = {"total_time_ms": 130_000, "peak_memory": 1_234_000_000, "stopped_early": early}
    view = RunView.of(Run(folder, about, result=ended, progress=Progress(records)))
    output = str(folder / "adapters.safetensors")
    return list(run_text.summary_lines(view, dataclasses.replace(CONFIG, output=output)))


def test_summary_shows_speed_losses_and_written_files(tmp_path: Path) -> None:
    assert summary(tmp_path, 2.0, 1.0, 1.5) == [
        "3 steps in 2m 10s, 3.0 rows/s, 2,000 tokens/s, peak memory 1.23 GB (predicted 2 GB)",
        "training loss 2.0000 (perplexity 7.389) in the last epoch",
        "validation loss 3.0000 (perplexity 20.09) before, 1.5000 (perplexity 4.482) at the end, "
        "1.0000 (perplexity 2.718) at best, after epoch 2",
        f"adapter of epoch 2, the best: {tmp_path / 'adapters.safetensors'}",
        f"checkpoints, metrics and ledger: {tmp_path / 'checkpoints'}",
    ]
    within = summary(tmp_path, 2.0, 1.5, within=1.0)
    assert within[2].endswith("1.0000 (perplexity 2.718) at best, after step 1 (epoch 1)")
    assert within[3].startswith("adapter of step 1 (epoch 1), the best: ")


def test_summary_of_rewards_names_no_loss(tmp_path: Path) -> None:
    view = RunView.of(read_run(write_rewarded_run(tmp_path)))
    gradient = MetricChange("fraction of rows with equal rewards", 0.5, 0.75, 1, "answers")
    view = dataclasses.replace(
        view, changes=(*view.changes, gradient), initial_val_loss=-0.5, best_val_loss=-0.25
    )
    config = TrainConfig("m", ("d",), objective="grpo", reward=("json",))
    lines = list(run_text.summary_lines(view, config))
    assert lines[0].startswith(
        "reward json fell while short.short rose: the model may be exploiting "
    )
    text = "\n".join(lines)
    assert "reward of sampled answers: sum of rewards rose: 1.12 in the first third" in text
    assert "in the last third, 75% of the rows taught nothing" in text
    assert "raise --group-size, or change --reward" in text
    assert "loss" not in text
    assert "no reward" not in text and "nothing was learned" not in text
    why = NoGradient.of({"frac_reward_zero_std": 1.0})
    nothing = dataclasses.replace(view, taught_nothing=why, unrewarded_fraction=0.3)
    lines = list(run_text.summary_lines(nothing, config))
    assert lines[2] == "30.0% of the sampled answers had no reward"
    assert lines[3].startswith("all answers to each prompt got the same reward, so nothing")
    line = run_text.epoch_line(epoch(1, val_loss=-0.5), best=True, objective="grpo")
    assert line.startswith("epoch 1: loss 2.0000, validation reward 0.5000, best so far")


def test_summary_without_validation_names_the_last_epoch(tmp_path: Path) -> None:
    found = summary(tmp_path, None, None)
    assert not any("validation" in line for line in found)
    assert found[2].startswith("adapter of the last epoch: ")


def test_summary_notes_an_early_stop_and_a_run_that_did_not_improve(tmp_path: Path) -> None:
    found = summary(tmp_path, 3.0, 4.0, early=True)
    assert any(line.startswith("stopped early after step 2: see --patience ") for line in found)
    assert any(line.startswith("no epoch was better on the validation rows") for line in found)
    assert not any(line.startswith("no epoch was better") for line in summary(tmp_path, 2.9))


def test_summary_says_that_the_starting_model_was_better(tmp_path: Path) -> None:
    found = summary(tmp_path, 3.5, 4.0)
    assert any(line.startswith("the starting model was better on the validation") for line in found)
    written = f"adapter of epoch 1, worse than the starting model: {tmp_path}"
    assert any(line.startswith(written) for line in found)
    assert not any("the best" in line for line in found)


def test_rise_or_jump_of_the_training_loss_names_the_learning_rate() -> None:
    def steps(*losses: float) -> list[StepRecord]:
        return [record(i, loss=loss) for i, loss in enumerate(losses, start=1)]

    low, high = [1.9, 2.1, 2.0, 1.9, 2.1], [2.9, 3.1, 3.0, 2.9, 3.1]
    rising = steps(*low, *[9.0] * 3, *high)
    assert run_text.risen_loss_line(rising, CONFIG) == (
        "the training loss rose from 2.00 in the first 5 steps to 3.00 in the last 5: "
        "lower --lr 0.05"
    )
    assert run_text.risen_loss_line(rising[:9], CONFIG) is None
    noisy = steps(*[3.0, 1.0, 2.0, 1.0, 3.0], *[3.1, 1.1, 2.1, 1.1, 3.1])
    assert run_text.risen_loss_line(noisy, CONFIG) is None
    jumping = steps(4.5, 2.9, 12.2, 8.9, 8.3, 6.9, 6.1, *[3.0] * 5)
    assert run_text.risen_loss_line(jumping, CONFIG) == (
        "the training loss jumped from 4.50 to 8.48 in steps 3 to 7: lower --lr 0.05"
    )
    assert run_text.risen_loss_line(jumping, CONFIG, before=6.0) is None
    assert run_text.risen_loss_line(jumping, dataclasses.replace(CONFIG, objective="dpo")) is None
    assert run_text.risen_loss_line(steps(*[2.0] * 5, *[1.9] * 5), CONFIG) is None


@pytest.mark.parametrize(
    ("name", "shown"),
    [("adapters.safetensors", "it's mine"), ("people.safetensors", "it's mine/people.safetensors")],
)
def test_usage_is_quoted_for_a_shell(tmp_path: Path, name: str, shown: str) -> None:
    config = dataclasses.replace(CONFIG, output=str(tmp_path / "it's mine" / name))
    words = shlex.split(run_text.usage_line(config))
    assert words == ["mlxtune", "chat", "--adapter", str(tmp_path / shown)]
    completes = shlex.split(run_text.usage_line(config, plain_text=True))
    assert completes[:5] == ["mlxtune", "generate", "--adapter", str(tmp_path / shown), "--prompt"]


# Profiles

STEP = StepProfile(
    10,
    2.0,
    {
        "data": Phase(0.1, 2_000, 1_000_000),
        "forward": Phase(0.5, 3_000_000, 4_000_000),
        "backward": Phase(1.3, 5_000_000, 9_000_000),
        "other": Phase(0.1, 0, 1_000_000),
    },
)


def test_profile_of_a_step_is_a_line_of_fractions_and_its_peak() -> None:
    assert run_text.profile_line(STEP) == (
        "step 10: 2 s: data 5%, forward 25%, backward 65%, other 5%; peak 9 MB in backward"
    )


def test_profile_of_a_run_is_a_table_of_means() -> None:
    made = run_text.ProfileSummary()
    assert list(run_text.profile_table(made)) == []
    made.add(STEP)
    made.add(StepProfile(20, 4.0, {"forward": Phase(3.5, 1, 6_000_000), "other": Phase(0.5, 0, 0)}))
    assert [" ".join(line.split()) for line in run_text.profile_table(made)] == [
        "2 steps profiled, 3 s a step",
        "phase time percent takes peak",
        "data 50 ms 1.7% 2 kB 1 MB",
        "forward 2 s 66.7% 3 MB 6 MB",
        "backward 650 ms 21.7% 5 MB 9 MB",
        "other 300 ms 10.0% 0 B 1 MB",
    ]


def result_of(steps: int, losses: dict[int, float], early: bool = False) -> InstructTrainResult:
    records: list[Any] = [record(step) for step in range(1, steps + 1)]
    progress = Progress([*records, *(ValidationRecord(i, v, 1.0) for i, v in losses.items())])
    return progress.result(early, 1)


@pytest.mark.parametrize(
    ("options", "steps", "losses", "changes", "expected"),
    [
        ({}, 60, {0: 3.0, 30: 2.0, 60: 1.0}, [-1.0], "may help: try --epochs "),
        ({"max_steps": 60}, 60, {0: 3.0, 60: 1.0}, [-1.0], "may help: try --max-steps 120"),
        ({}, 60, {0: 3.0, 30: 1.0, 60: 2.0}, [-1.0], None),
        ({}, 10, {0: 3.0, 10: 2.9}, [0.1, -0.1], "10 steps are too few: try --auto"),
        ({"lr": 2e-6}, 60, {0: 3.0, 60: 2.99}, [0.1, -0.1], "--lr 2e-06 is tiny: try --auto"),
        ({"lr": 2e-6, "auto": True}, 60, {0: 3.0, 30: 2.0, 60: 2.9}, [0.1, -0.1], None),
    ],
)
def test_line_after_a_verdict_says_what_to_try(
    options: dict[str, Any],
    steps: int,
    losses: dict[int, float],
    changes: list[float],
    expected: str | None,
) -> None:
    config = TrainConfig("m", data=("d",), **options)
    found = evaluated(changes * 20)
    line = run_text.next_try_line(found, config, result_of(steps, losses), steps)
    assert line is None if expected is None else expected in str(line)


def test_less_likely_chosen_answers_suggest_a_weight_for_them() -> None:
    config = TrainConfig("m", data=("d",), objective="dpo")
    preference = PreferenceDifference("dpo", True, 0.5, 0.9, 0.1, 0.6, 0.95, 0.0, 0.2)
    found = dataclasses.replace(evaluated([0.5] * 39 + [0.4]), preference=preference)
    result = result_of(60, {0: 3.0, 60: 1.0})
    assert "try --sft-weight" in str(run_text.next_try_line(found, config, result, 60))
    weighted = dataclasses.replace(config, sft_weight=1.0)
    assert "--sft-weight" not in str(run_text.next_try_line(found, weighted, result, 60))


@pytest.mark.parametrize(
    ("alike", "unrewarded", "masked", "sampled", "exact", "expected"),
    [
        (0.9, 0.0, 0.0, 0.1, -0.1, "fewer answers are exact than before"),
        (0.9, 0.0, 0.0, 0.1, 0.0, "for 90% of the rows, all answers got the same reward"),
        (0.9, 0.4, 0.0, 0.1, 0.0, "for 50% of the rows, all answers got the same reward"),
        (0.9, 0.5, 0.0, 0.1, 0.0, "for 50% of the rows, no answer had a reward, so they taught"),
        (0.1, 0.0, 0.5, 0.1, 0.0, "for 50% of the rows, the answers that would teach were trunc"),
        (0.1, 0.1, 0.0, 0.1, 0.0, "only the sampled answers got better, so more training may"),
        (0.1, 0.0, 0.0, -0.1, 0.0, "None"),
    ],
)
def test_reward_that_did_not_rise_suggests_why(
    alike: float, unrewarded: float, masked: float, sampled: float, exact: float, expected: str
) -> None:
    config = TrainConfig("m", data=("d",), objective="grpo", reward=("json",))
    result = result_of(20, {0: 0.0})
    steps = [
        dataclasses.replace(
            step,
            metrics={
                "frac_reward_zero_std": alike,
                "frac_without_reward": unrewarded,
                "frac_masked": masked,
            },
        )
        for step in result.steps
    ]
    changes = (
        RewardChange("", False, 0.5, 0.5, -0.1, 0.1),
        RewardChange("", True, 0.5, 0.6, sampled, 0.2),
        RewardChange("exact", False, 0.5, 0.5, -0.2, exact),
    )
    found = dataclasses.replace(evaluated([0.5, 0.4]), rewards=changes, verdict="cannot tell")
    line = run_text.next_try_line(found, config, dataclasses.replace(result, steps=steps), 20)
    assert str(line).startswith(expected)
