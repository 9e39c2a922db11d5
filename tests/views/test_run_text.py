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
from mlxtune.core.run.metrics import InstructEpochMetrics, StepRecord, ValidationRecord
from mlxtune.core.run.progress import Progress, Record
from mlxtune.core.run.stored_run import Run
from mlxtune.core.run.summary import RunView
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.views import run_text
from tests.core.training.fake_pipeline import FakePipeline
from tests.core.training.records import epoch_metrics, step_record


def test_loss_stands_with_its_perplexity() -> None:
    assert run_text.loss_and_perplexity(2.0) == "2.0000 (perplexity 7.389)"
    assert run_text.loss_and_perplexity(100.0) == "100.0000 (perplexity over 1,000,000)"


def test_rows_and_tokens_of_a_file_are_all_accounted_for() -> None:
    ledger = Ledger(
        path="chat.jsonl",
        rows_read=1010,
        rows_train=800,
        rows_validation=200,
        rows_skipped=Counter({"no assistant turn": 7, "not valid JSON": 3}),
        rows_truncated=1,
        tokens=50_000,
        tokens_supervised=20_000,
        tokens_context=29_000,
        tokens_truncated=1000,
    )
    assert ledger.adds_up()

    assert run_text.rows_line(ledger) == (
        "chat.jsonl: 1,010 rows read, 800 train, 200 validate, "
        "10 skipped (no assistant turn: 7, not valid JSON: 3)"
    )
    assert run_text.tokens_line(ledger) == (
        "50,000 tokens = 20,000 supervised + 29,000 context + 1,000 truncated from 1 row"
    )


def test_what_did_not_happen_to_rows_is_not_said() -> None:
    ledger = Ledger("chat.jsonl", 1, 1, tokens=9, tokens_supervised=3, tokens_context=6)

    assert run_text.rows_line(ledger) == "chat.jsonl: 1 row read, 1 train"
    assert run_text.tokens_line(ledger) == "9 tokens = 3 supervised + 6 context + 0 truncated"


def test_examples_are_counted_where_rows_became_several() -> None:
    several = Ledger("chat.jsonl", 3, 1, 1, examples=3, tokens=9)
    assert run_text.tokens_line(several).startswith("9 tokens in 3 examples = 0 supervised + ")
    one_each = Ledger("chat.jsonl", 3, 2, 1, examples=3, tokens=9)
    assert run_text.tokens_line(one_each).startswith("9 tokens = ")


@pytest.mark.parametrize(
    ("rows", "detail", "text"),
    [
        (1, "", "a.jsonl:7: looks odd: mend it"),
        (2, "message 3", "a.jsonl:7: looks odd (message 3), and 1 more: mend it"),
        (1235, "", "a.jsonl:7: looks odd, and 1,234 more: mend it"),
    ],
)
def test_finding_names_the_first_row_and_how_many_more_there_are(
    rows: int, detail: str, text: str
) -> None:
    places = (Place("a.jsonl", 7, detail), Place("b.jsonl", 1))[:rows]
    assert run_text.finding_line(Finding("warning", "looks odd", rows, "mend it", places)) == text


def record(step: int, **changes: Any) -> StepRecord:
    values = {"loss": 2.34567, "grad_norm": 0.98765, "tokens": 3000, "supervised_tokens": 1000}
    return step_record(step, **values | {"seconds": 0.5} | changes)


def test_state_of_a_step_has_the_average_loss_the_speed_and_the_memory() -> None:
    state = run_text.step_state(record(10), average=2.5, peak_gb=3.456)
    assert state == "loss 2.500  6,000 tok/s  3.46 GB"
    assert run_text.step_state(record(10), 2.5, 3.456, "serious") == f"{state}  thermal: serious"


def test_step_line_has_loss_rate_norm_speed_and_memory() -> None:
    assert run_text.step_line(record(10), total_steps=100, average=2.5, peak_gb=3.456) == (
        "step 10/100  loss 2.3457  average 2.5000  lr 0.0001  grad norm 0.988  "
        "6,000 tokens/s  peak 3.46 GB"
    )
    # The clock may show equal times before and after a step.
    assert "tokens/s" in run_text.step_line(record(1, seconds=0.0), 1, 2.5, 0.0)


def epoch(number: int, val_loss: float | None) -> InstructEpochMetrics:
    return epoch_metrics(number, val_loss, epoch_time_ms=65_000, samples_per_sec=12.34)


def test_epoch_line_tells_a_best_epoch_from_another_and_from_one_without_validation() -> None:
    assert run_text.epoch_line(epoch(2, val_loss=1.0), best=True) == (
        "epoch 2: train 2.0000, validation 1.0000 (perplexity 2.718), best so far; "
        "12.3 rows/s, 1m 05s"
    )
    assert "best" not in run_text.epoch_line(epoch(2, val_loss=1.0), best=False)
    assert run_text.epoch_line(epoch(2, val_loss=None), best=False) == (
        "epoch 2: train 2.0000; 12.3 rows/s, 1m 05s"
    )


def test_validation_line_has_the_step_as_a_fraction_of_an_epoch() -> None:
    assert run_text.validation_line(10, 1 / 3, 1.0, best=True) == (
        "step 10 (epoch 0.33): 1.0000 (perplexity 2.718), best so far"
    )
    assert run_text.validation_line(10, 1 / 3, 1.0, best=False).endswith("2.718)")


def test_plan_says_how_much_will_be_trained_and_how() -> None:
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
    assert "10 training rows, 3 validate;" in plan(corpus[:3])
    assert "3 validate every 2 steps;" in plan(corpus[:3], val_steps=2)
    assert plan([], val_steps=2) == plan([])


def test_template_that_the_model_lacks_is_said_to_be_left_out_by_mlx_lm() -> None:
    config = TrainConfig("model", ("data.jsonl",), output="out")
    plain, added = (run_text.template_line("t", config, added=each) for each in (False, True))
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
    config = TrainConfig(model_path="data/my model", data=("chat.jsonl",), output=output)
    return list(run_text.summary_lines(view, config))


def test_summary_tells_speed_losses_and_what_was_written(tmp_path: Path) -> None:
    assert summary(tmp_path, 2.0, 1.0, 1.5) == [
        "3 steps in 2m 10s, 3.0 rows/s, 2,000 tokens/s, peak memory 1.23 GB (predicted 2 GB)",
        "training loss 2.0000 (perplexity 7.389) in the last epoch",
        "validation loss 3.0000 (perplexity 20.09) before, 1.5000 (perplexity 4.482) at the end, "
        "1.0000 (perplexity 2.718) at best, after epoch 2",
        f"adapter of epoch 2, the best: {tmp_path / 'adapters.safetensors'}",
        f"checkpoints, metrics and ledger: {tmp_path / 'checkpoints'}",
    ]


def test_summary_names_the_step_of_a_best_validation_within_an_epoch(tmp_path: Path) -> None:
    found = summary(tmp_path, 2.0, 1.5, within=1.0)
    assert found[2].endswith("1.0000 (perplexity 2.718) at best, after step 1 (epoch 1)")
    assert found[3].startswith("adapter of step 1 (epoch 1), the best: ")


def test_loss_that_ends_above_its_start_is_a_warning_that_names_the_rate() -> None:
    config = TrainConfig("data/demo", ("chat.jsonl",), lr=0.05)

    def steps(*losses: float) -> list[StepRecord]:
        return [record(i, loss=loss) for i, loss in enumerate(losses, start=1)]

    rising = steps(*[2.0] * 5, *[9.0] * 3, *[3.0] * 5)
    assert run_text.risen_loss_line(rising, config) == (
        "the training loss rose from 2.00 in the first 5 steps to 3.00 in the last 5: "
        "lower --lr 0.05"
    )
    assert run_text.risen_loss_line(rising[:9], config) is None
    jumping = steps(4.5, 2.9, 12.2, 8.9, 8.3, 6.9, 6.1, *[3.0] * 5)
    assert run_text.risen_loss_line(jumping, config) == (
        "the training loss jumped from 4.50 to 8.48 in steps 3 to 7: lower --lr 0.05"
    )
    assert run_text.risen_loss_line(jumping, config, before=6.0) is None
    assert run_text.risen_loss_line(jumping, dataclasses.replace(config, objective="dpo")) is None
    assert run_text.risen_loss_line(steps(*[2.0] * 5, *[1.9] * 5), config) is None


def test_summary_of_a_run_without_validation_names_the_last_epoch(tmp_path: Path) -> None:
    found = summary(tmp_path, None, None)

    assert not any("validation" in line for line in found)
    assert found[2].startswith("adapter of the last epoch: ")


def test_summary_says_when_the_run_stopped_early_and_when_it_did_not_help(tmp_path: Path) -> None:
    found = summary(tmp_path, 3.0, 4.0, early=True)

    assert any(line.startswith("stopped early after step 2: see --patience ") for line in found)
    assert any(line.startswith("no epoch was better on the validation rows") for line in found)
    assert not any("better than the base" in line for line in summary(tmp_path, 2.9))


@pytest.mark.parametrize(
    ("name", "shown"),
    [("adapters.safetensors", "it's mine"), ("people.safetensors", "it's mine/people.safetensors")],
)
def test_usage_is_a_chat_with_the_adapter_as_a_shell_reads_it(
    tmp_path: Path, name: str, shown: str
) -> None:
    output = str(tmp_path / "it's mine" / name)
    config = TrainConfig("data/my model", ("data.jsonl",), output=output)
    words = shlex.split(run_text.usage_line(config))
    assert words == ["mlxtune", "chat", "--adapter", str(tmp_path / shown)]
    completes = shlex.split(run_text.usage_line(config, plain_text=True))
    assert completes[:5] == ["mlxtune", "generate", "--adapter", str(tmp_path / shown), "--prompt"]
