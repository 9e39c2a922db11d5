"""The recipe from Python: its result, its files, and its end."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import mlxtune
from mlxtune import (
    ConfigError,
    DataError,
    MlxTuneError,
    ModelError,
    OutputError,
    TrainConfig,
    TrainingInterrupted,
    TrainResult,
    train,
)
from mlxtune.backend.adapters import checkpoint_tensors
from mlxtune.commands.train import RunMode, run_training
from mlxtune.config import DataConfig
from mlxtune.config.fields import flag
from mlxtune.core.data.held_out import RunRows
from mlxtune.core.files.hashing import base_fingerprint
from mlxtune.core.run.checkpoint import write_checkpoint
from mlxtune.core.run.metrics import StepRecord
from mlxtune.core.run.run_folder import request_stop
from mlxtune.core.run.stored_run import read_run
from mlxtune.core.run.summary import RunView, data_names
from mlxtune.core.run.trained_rows import read_trained_rows
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.session.arguments import resolve_options
from mlxtune.session.dataset import Dataset, DataSource, load_dataset
from mlxtune.session.reader import Reader
from tests.command import Cli
from tests.configs import train_to
from tests.models import sums, write_chat
from tests.slow import slow

ROWS, EPOCHS = 20, 3
ADAPTER = "adapters.safetensors"
CHECKPOINT = {
    *(ADAPTER, "adapter_config.json", "optimizer.safetensors"),
    *("metadata.json", "metrics.jsonl", "manifest.json"),
}
RUN = {".mlxtune", "run.json", "metrics.jsonl", "ledger.json", "result.json", "report.html"}
RUN |= {"trained_rows.bin"}
VALIDATED = {*RUN, "evaluation.json"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("data") / "chat.jsonl", sums(ROWS))


@pytest.fixture(scope="module")
def gibberish(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A validation file on which the loss rises in training."""
    rows = [[("user", f"What is {i}?"), ("assistant", "zqxj%~" * 3)] for i in range(3)]
    return write_chat(tmp_path_factory.mktemp("data") / "gibberish.jsonl", rows)


def config(model: Path, chat: Path, folder: Path, **options: Any) -> TrainConfig:
    defaults = {"epochs": EPOCHS, "lr": 1e-2, "targets": ("all",), "quiet": True, "samples": 0}
    output = {"output": str(folder / ADAPTER)}
    return TrainConfig(str(model), str(chat), **{**output, **defaults, **options})


Run = tuple[Path, TrainResult]


@pytest.fixture(scope="module")
def run(model: Path, chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of three epochs in a new folder, with a fifth of the rows held out."""
    folder = tmp_path_factory.mktemp("run") / "new" / "folder"
    return folder, train(config(model, chat, folder))


@pytest.fixture(scope="module")
def worsening_run(
    model: Path, chat: Path, gibberish: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A run whose validation loss rises from the first epoch on, stopped after two more epochs."""
    folder = tmp_path_factory.mktemp("worsening")
    options = {"val_data": str(gibberish), "epochs": 8, "patience": 2, "schedule": "constant"}
    options |= {"keep": 8}
    return folder, train(config(model, chat, folder, **options))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The result


def test_result_names_the_written_paths(run: Run, chat: Path) -> None:
    folder, result = run
    assert result.adapter == folder / ADAPTER
    assert result.checkpoint_dir == folder / "checkpoints"
    assert result.peak_memory_gb > 0
    assert [ledger.path for ledger in result.ledgers] == [str(chat)]


def test_result_holds_each_epoch_and_each_step(run: Run) -> None:
    training = run[1].training
    assert training is not None
    assert [metrics.epoch for metrics in training.epoch_metrics] == [1, 2, 3]
    assert [(step.step, step.epoch) for step in training.steps] == [
        (step, (step + 3) // 4) for step in range(1, 13)
    ]
    assert not training.stopped_early
    assert training.total_time_ms > 0
    for metrics in training.epoch_metrics:
        assert metrics.train_perplexity == pytest.approx(math.exp(metrics.train_loss))
        assert metrics.val_perplexity == pytest.approx(math.exp(metrics.val_loss or 0))
        assert metrics.samples_per_sec > 0


def test_result_describes_the_run_as_its_folder_does(run: Run, worsening_run: Run) -> None:
    for folder, result in (run, worsening_run):
        described = result.run
        assert described is not None
        described = replace(described, evaluation=result.evaluation)
        kept = read_run(folder / "checkpoints")
        assert RunView.of(described) == RunView.of(kept)
        assert data_names(described) == data_names(kept)


def test_best_epoch_is_the_one_of_lowest_validation_loss(run: Run) -> None:
    training = run[1].training
    assert training is not None
    losses = {metrics.epoch: metrics.val_loss or 0 for metrics in training.epoch_metrics}
    assert training.best_epoch == min(losses, key=lambda epoch: losses[epoch])
    assert training.best_val_loss == min(losses.values())
    assert training.best_val_loss < (training.initial_val_loss or 0)


def test_training_lowers_the_training_loss(run: Run) -> None:
    training = run[1].training
    assert training is not None
    assert training.epoch_metrics[-1].train_loss < training.epoch_metrics[0].train_loss - 0.5


def test_ledger_accounts_for_every_row(run: Run) -> None:
    (ledger,) = run[1].ledgers
    assert (ledger.rows_read, ledger.rows_train, ledger.rows_validation) == (ROWS, 16, 4)
    assert ledger.adds_up()


# The files


def test_run_writes_these_files_and_no_others(run: Run) -> None:
    folder = run[0]
    assert names_in(folder) == {ADAPTER, "adapter_config.json", "checkpoints"}
    checkpoints = folder / "checkpoints"
    # The two most recent checkpoints are kept.
    epochs = {"epoch-2", "epoch-3"}
    assert names_in(checkpoints) == {"best", *epochs, *VALIDATED}
    for name in ("best", *epochs):
        assert names_in(checkpoints / name) == CHECKPOINT


def test_adapter_config_is_mlx_lms_and_next_to_the_output(run: Run, model: Path) -> None:
    written = json.loads((run[0] / "adapter_config.json").read_text())
    keys = written["lora_parameters"].pop("keys")
    trained = written["mlxtune"].pop("trained_rows")
    held_out = {"val_split": 0.2, "seed": 42, "val_rows": 1000}
    assert (trained["rows"], trained["held_out"]) == (16, held_out)
    assert re.fullmatch("sha256:[0-9a-f]{64}", trained["hash"])
    assert written == {
        "fine_tune_type": "lora",
        "model": str(model),
        "num_layers": 1,
        "lora_parameters": {"rank": 8, "scale": 2.0, "dropout": 0.0},
        "mlxtune": {
            "base": base_fingerprint(model),
            "chat_template": "none",
            "prompt": {},
            "rank": 8,
            "alpha": 16.0,
            "rslora": False,
            "init": "lora",
            "target_ranks": {},
        },
    }
    assert "self_attn.q_proj" in keys
    assert len(keys) == 7


def test_output_is_the_best_epochs_adapter(worsening_run: Run) -> None:
    folder, result = worsening_run
    assert result.training is not None
    last = len(result.training.epoch_metrics)
    assert result.training.best_epoch is not None
    assert result.training.best_epoch < last
    adapter = (folder / ADAPTER).read_bytes()
    checkpoints = folder / "checkpoints"
    assert adapter == (checkpoints / "best" / ADAPTER).read_bytes()
    assert adapter == (checkpoints / f"epoch-{result.training.best_epoch}" / ADAPTER).read_bytes()
    assert adapter != (checkpoints / f"epoch-{last}" / ADAPTER).read_bytes()


def test_best_checkpoint_from_before_a_resume_gives_only_its_tensors(
    model: Path, chat: Path, gibberish: Path, worsening_run: Run, tmp_path: Path
) -> None:
    """Another user may have made the run that is resumed, and its files are not copied."""
    whole = worsening_run[1].training
    assert whole is not None
    assert whole.best_step is not None
    options = {"val_data": str(gibberish), "epochs": 8, "patience": 2, "schedule": "constant"}
    with pytest.raises(TrainingInterrupted):
        train_to(config(model, chat, tmp_path, **options), whole.best_step + 1)
    best = tmp_path / "checkpoints" / "best"
    tensors = safetensors.numpy.load_file(best / ADAPTER)

    def forge(folder: Path) -> None:
        forged = {"adapter_config": '{"forged": true}'}
        safetensors.numpy.save_file(tensors, folder / ADAPTER, forged)
        (folder / "adapter_config.json").write_text(forged["adapter_config"])
        shutil.copy(best / "optimizer.safetensors", folder)

    metadata, metrics = json.loads((best / "metadata.json").read_text()), best / "metrics.jsonl"
    write_checkpoint(best, forge, metadata, [metrics.read_bytes()])

    training = mlxtune.resume(tmp_path).training

    assert training is not None
    assert training.best_step == whole.best_step
    written = safetensors.numpy.load_file(tmp_path / ADAPTER)
    assert written.keys() == tensors.keys()
    assert all((written[name] == tensors[name]).all() for name in tensors)
    assert b"forged" not in (tmp_path / ADAPTER).read_bytes()
    assert json.loads((tmp_path / "adapter_config.json").read_text())["model"] == str(model)


def test_run_stops_when_patience_is_over(worsening_run: Run) -> None:
    training = worsening_run[1].training
    assert training is not None
    assert training.stopped_early
    assert training.best_epoch == len(training.epoch_metrics) - 2


def test_adapter_loaded_by_mlx_lm_gives_best_validation_loss(
    worsening_run: Run, model: Path, gibberish: Path
) -> None:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.utils import load

    folder, result = worsening_run
    loaded, tokenizer = load(str(model), adapter_path=str(folder))
    total, count = 0.0, 0
    for row in read_lines(gibberish):
        question, answer = (message["content"] for message in row["messages"])
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(f"{prompt}{answer}<|im_end|>", add_special_tokens=False)
        begin = len(tokenizer.encode(prompt, add_special_tokens=False))
        logits = loaded(mx.array([ids[:-1]]))[0, begin - 1 :]
        total += float(nn.losses.cross_entropy(logits, mx.array(ids[begin:]), reduction="sum"))
        count += len(ids) - begin
    assert result.training is not None
    assert total / count == pytest.approx(result.training.best_val_loss, rel=1e-4)


def test_checkpoint_metadata_records_how_it_was_made(run: Run, model: Path, chat: Path) -> None:
    folder, result = run
    metadata = json.loads((folder / "checkpoints" / "epoch-2" / "metadata.json").read_text())
    assert result.training is not None
    metrics = result.training.epoch_metrics[1]
    assert metadata["task"] == "instruct"
    assert (metadata["epoch"], metadata["step"], metadata["seed"]) == (2, 8, 42)
    assert (metadata["lora_rank"], metadata["lora_alpha"]) == (8, 16.0)
    assert metadata["targets"] == ["all"]
    for name in ("train_loss", "val_loss", "train_perplexity", "val_perplexity", "learning_rate"):
        assert metadata[name] == getattr(metrics, name)
    assert metadata["epoch_time_ms"] == metrics.epoch_time_ms
    assert metadata["samples_per_sec"] == metrics.samples_per_sec
    assert metadata["data_hash"].startswith("sha256:")
    assert {"mlxtune", "mlx", "mlx-lm", "python"} <= metadata["versions"].keys()
    assert metadata["config"]["data"] == [str(chat)]
    assert metadata["config"]["model_path"] == str(model)


def test_saved_config_is_one_that_can_be_run_again(run: Run) -> None:
    folder, _ = run
    metadata = json.loads((folder / "checkpoints" / "best" / "metadata.json").read_text())
    assert TrainConfig(**metadata["config"]).output_path == folder / ADAPTER


def test_metrics_file_holds_steps_validations_and_epochs_in_order(run: Run) -> None:
    folder, result = run
    records = read_lines(folder / "checkpoints" / "metrics.jsonl")
    epoch = ["step"] * 4 + ["validation", "epoch"]
    assert [record["kind"] for record in records] == ["validation", *epoch * EPOCHS]
    assert result.training is not None
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    assert losses == [step.loss for step in result.training.steps]
    assert records[0]["step"] == 0
    assert records[0]["val_loss"] == result.training.initial_val_loss


def test_ledger_of_each_data_file_is_saved(worsening_run: Run, chat: Path, gibberish: Path) -> None:
    folder, result = worsening_run
    saved = json.loads((folder / "checkpoints" / "ledger.json").read_text())
    assert saved == [ledger.as_dict() for ledger in result.ledgers]
    assert [ledger["path"] for ledger in saved] == [str(chat), str(gibberish)]


def test_same_run_again_writes_the_same_bytes(
    run: Run, model: Path, chat: Path, tmp_path: Path
) -> None:
    train(config(model, chat, tmp_path))
    assert (tmp_path / ADAPTER).read_bytes() == (run[0] / ADAPTER).read_bytes()


def test_earlier_run_is_set_aside_and_named(
    model: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    train(config(model, chat, tmp_path, epochs=2))
    first = (checkpoints / "epoch-1" / ADAPTER).read_bytes()
    (checkpoints / "notes.txt").write_text("mine")
    train(config(model, chat, tmp_path, epochs=1, lr=1e-3, quiet=False))
    assert str(checkpoints / "previous-1") in capsys.readouterr().err
    assert names_in(checkpoints) == {"best", "epoch-1", *VALIDATED, "notes.txt", "previous-1"}
    assert names_in(checkpoints / "previous-1") == {"best", "epoch-1", "epoch-2", *VALIDATED}
    assert (checkpoints / "previous-1" / "epoch-1" / ADAPTER).read_bytes() == first
    assert (checkpoints / "epoch-1" / ADAPTER).read_bytes() != first
    records = read_lines(checkpoints / "metrics.jsonl")
    assert sum(record["kind"] == "step" for record in records) == 4


def test_output_may_have_any_name(
    model: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tuned.safetensors"
    result = train(config(model, chat, tmp_path, output=str(output), epochs=1, quiet=False))
    assert result.adapter == output
    assert names_in(tmp_path) == {"tuned.safetensors", "adapter_config.json", "checkpoints"}
    # mlx-lm loads only folders with a file adapters.safetensors, such as best/.
    best = tmp_path / "checkpoints" / "best"
    assert output.read_bytes() == (best / ADAPTER).read_bytes()
    assert f"mlxtune chat --adapter {output}" in capsys.readouterr().err


def test_checkpoints_are_written_to_checkpoint_dir(model: Path, chat: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "ck"
    result = train(config(model, chat, tmp_path, epochs=1, checkpoint_dir=str(folder)))
    assert result.checkpoint_dir == folder
    assert names_in(folder) == {"best", "epoch-1", *VALIDATED}
    assert names_in(tmp_path) == {ADAPTER, "adapter_config.json", "elsewhere"}


def test_epochs_between_checkpoints(model: Path, chat: Path, tmp_path: Path) -> None:
    train(config(model, chat, tmp_path, epochs=4, save_every=3, val_split=0))
    names = names_in(tmp_path / "checkpoints")
    assert {name for name in names if name.startswith("epoch")} == {"epoch-3"}


# Validation


def test_without_validation_the_output_is_the_last_epochs(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    result = train(config(model, chat, tmp_path, val_split=0, epochs=2))
    training, checkpoints = result.training, tmp_path / "checkpoints"
    assert training is not None
    assert (training.best_epoch, training.best_val_loss, training.initial_val_loss) == (None,) * 3
    assert all(metrics.val_loss is None for metrics in training.epoch_metrics)
    assert names_in(checkpoints) == {"epoch-1", "epoch-2", *RUN}
    adapter = (tmp_path / ADAPTER).read_bytes()
    assert adapter == (checkpoints / "epoch-2" / ADAPTER).read_bytes()
    assert adapter != (checkpoints / "epoch-1" / ADAPTER).read_bytes()
    (ledger,) = result.ledgers
    assert (ledger.rows_train, ledger.rows_validation) == (ROWS, 0)


def test_validation_file_leaves_all_rows_to_training(worsening_run: Run) -> None:
    trained, validated = worsening_run[1].ledgers
    assert (trained.rows_train, trained.rows_validation) == (ROWS, 0)
    assert (validated.rows_train, validated.rows_validation) == (0, 3)
    assert trained.adds_up()
    assert validated.adds_up()


def test_rows_held_out_are_bounded(model: Path, chat: Path, tmp_path: Path) -> None:
    result = train(config(model, chat, tmp_path, val_split=0.5, val_rows=3), dry_run=True)
    (ledger,) = result.ledgers
    assert (ledger.rows_train, ledger.rows_validation) == (17, 3)


def test_rows_held_out_by_the_data_set_validate(
    model: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that no option would choose are held out, so that a second choice would differ."""
    chosen: list[Dataset] = []

    def load(config: DataConfig, reader: Reader, source: DataSource) -> Dataset:
        dataset = load_dataset(config, reader, source)
        held_out = [3, 4, 11]
        trained = [row for row in range(ROWS) if row not in held_out]
        rows = RunRows(dataset.corpus.select(trained), dataset.corpus.select(held_out))
        chosen.append(replace(dataset, rows=rows))
        return chosen[-1]

    monkeypatch.setattr("mlxtune.session.session.load_dataset", load)
    train(config(model, chat, tmp_path, epochs=1, val_split=0.5, seed=7))

    (dataset,), checkpoints = chosen, tmp_path / "checkpoints"
    trained = read_trained_rows(checkpoints, pytest.fail)
    assert np.isin(dataset.rows.train.identities, trained).all()
    assert not np.isin(dataset.rows.validation.identities, trained).any()
    plan = json.loads((checkpoints / "run.json").read_text())["plan"]
    assert (plan["rows_train"], plan["rows_validation"]) == (17, 3)
    assert json.loads((checkpoints / "evaluation.json").read_text())["rows"] == 3


# Other ends of a run


def test_validation_within_epochs_changes_no_step(
    run: Run, model: Path, chat: Path, tmp_path: Path
) -> None:
    training = train(config(model, chat, tmp_path, val_steps=3)).training
    assert training is not None
    lines = read_lines(tmp_path / "checkpoints" / "metrics.jsonl")
    steps = [line["step"] for line in lines if line["kind"] == "validation"]
    assert steps == [0, 3, 4, 6, 8, 9, 12]
    last = Path("checkpoints") / "epoch-3" / ADAPTER
    assert (tmp_path / last).read_bytes() == (run[0] / last).read_bytes()
    html = (tmp_path / "checkpoints" / "report.html").read_text()
    assert f'"x":{json.dumps(steps, separators=(",", ":"))}' in html


@pytest.mark.parametrize("name", ["val_steps", "patience"])
def test_option_of_validation_without_rows_is_an_error_before_any_work(
    model: Path, chat: Path, tmp_path: Path, name: str
) -> None:
    options = {name: 3, "val_split": 0}
    with pytest.raises(ConfigError, match=rf"{flag(name)}: there are no validation rows: leave"):
        train(config(model, chat, tmp_path, **options))
    assert not (tmp_path / "checkpoints").exists()


def test_dry_run_returns_the_ledger_and_writes_nothing(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    result = train(config(model, chat, tmp_path / "new"), dry_run=True)
    assert result.training is None
    assert result.adapter is None
    assert all(ledger.adds_up() for ledger in result.ledgers)
    assert len(result.ledgers) == 1
    assert names_in(tmp_path) == set()


def test_run_stops_at_max_steps_within_an_epoch(model: Path, chat: Path, tmp_path: Path) -> None:
    training = train(config(model, chat, tmp_path, max_steps=6)).training
    assert training is not None
    assert len(training.steps) == 6
    assert [metrics.epoch for metrics in training.epoch_metrics] == [1, 2]
    assert names_in(tmp_path / "checkpoints" / "epoch-2") == CHECKPOINT


def test_failed_run_leaves_an_earlier_adapter_alone(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    train(config(model, chat, tmp_path, max_steps=1))
    before = (tmp_path / ADAPTER).read_bytes()
    with pytest.raises(mlxtune.NonFiniteLossError, match="learning rate 1e\\+30"):
        train(config(model, chat, tmp_path, lr=1e30, max_grad_norm=0, schedule="constant"))
    assert (tmp_path / ADAPTER).read_bytes() == before


def test_interrupt_is_raised_with_the_checkpoint(
    model: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.step.pipeline import InstructPipeline

    whole = InstructPipeline.start_batch

    def interrupted(self: Any, examples: Any, *, step: int, **options: Any) -> Any:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return whole(self, examples, step=step, **options)

    monkeypatch.setattr(InstructPipeline, "start_batch", interrupted)
    with pytest.raises(TrainingInterrupted) as interrupt:
        train(config(model, chat, tmp_path))
    assert interrupt.value.step == 3
    assert interrupt.value.checkpoint == tmp_path / "checkpoints" / "step-3"
    assert names_in(tmp_path / "checkpoints" / "step-3") == CHECKPOINT
    assert not (tmp_path / ADAPTER).exists()


def test_run_outside_the_main_thread_works(model: Path, chat: Path, tmp_path: Path) -> None:
    thread = threading.Thread(target=train, args=[config(model, chat, tmp_path, max_steps=1)])
    thread.start()
    thread.join()
    assert (tmp_path / ADAPTER).is_file()


def test_errors_are_the_packages_own(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        train(config(tmp_path / "missing", tmp_path / "chat.jsonl", tmp_path))
    with pytest.raises(DataError):
        train(config(model, tmp_path / "missing.jsonl", tmp_path))


def test_stop_request_saves_the_step_and_ends_the_run(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    configured = config(model, chat, tmp_path)

    class Asking(TrainingObserver):
        def on_step(self, record: StepRecord) -> None:
            if record.step == 2:
                request_stop(configured.checkpoint_path)

    with pytest.raises(TrainingInterrupted) as interrupted:
        train(configured, observers=[Asking()])
    checkpoint = interrupted.value.checkpoint
    assert checkpoint is not None
    assert checkpoint.name == f"step-{interrupted.value.step}"
    assert interrupted.value.step in (2, 3)


def test_live_run_answers_rows_after_each_validation_and_learns_the_same(
    model: Path, chat: Path, run: Run, tmp_path: Path
) -> None:
    _, plain = run
    written: list[dict[str, Any]] = []
    configured = config(model, chat, tmp_path, samples=2)

    class Reading(TrainingObserver):
        def on_epoch(self, metrics: Any, best: bool) -> None:
            path = configured.checkpoint_path / "samples.json"
            written.append(json.loads(path.read_text()))

    result = run_training(resolve_options(configured), RunMode(observers=[Reading()], live=True))
    assert plain.adapter is not None
    assert configured.output_path.read_bytes() == plain.adapter.read_bytes()
    assert len(written) == EPOCHS
    steps = len(result.training.steps) if result.training else 0
    assert written[-1]["step"] == steps
    assert result.evaluation is not None
    assert result.evaluation.generated is not None
    best = result.training.best_epoch if result.training else None
    assert best is not None
    # The finished adapter, loaded again, gives the same answers.
    for live, final in zip(
        written[best - 1]["samples"], result.evaluation.generated.samples, strict=True
    ):
        assert (live["path"], live["row"], live["prompt"]) == (final.path, final.row, final.prompt)
        assert final.adapted is not None
        assert live["base"][:40] == final.adapted[:40]


def test_answers_that_fail_do_not_fail_the_run(
    model: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr("mlxtune.session.judge._draw", failing)
        configured = config(model, chat, tmp_path, samples=2, epochs=1, max_steps=1, val_rows=2)
        patch.setattr("mlxtune.commands.train.judge", lambda *_: None)
        run_training(resolve_options(configured), RunMode(live=True))
    assert configured.output_path.is_file()
    assert not (configured.checkpoint_path / "samples.json").exists()


@pytest.mark.slow
def test_run_whose_folder_moves_stops_and_is_resumed_where_it_is(
    run: Run, model: Path, chat: Path, tmp_path: Path
) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"

    def move(record: StepRecord) -> None:
        if record.step == 3:
            folder.rename(moved)

    with pytest.raises(MlxTuneError, match="was moved, removed or replaced during the run"):
        train(config(model, chat, folder, save_steps=1), on_step=move)
    assert not folder.exists()
    with pytest.raises(MlxTuneError, match="no such folder"):
        mlxtune.resume(folder)
    result = mlxtune.resume(moved)
    assert result.adapter is not None
    assert result.adapter.read_bytes() == (run[0] / ADAPTER).read_bytes()


# A disk on which no checkpoint fits


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While this is set, the disk has room for an adapter, and none for an optimizer's state."""
    event, write = threading.Event(), checkpoint_tensors.write_tensors

    def write_if_it_fits(path: Path, *rest: Any) -> None:
        if event.is_set() and path.name == "optimizer.safetensors":
            raise OutputError(f"{path} cannot be written: No space left on device")
        write(path, *rest)

    monkeypatch.setattr(checkpoint_tensors, "write_tensors", write_if_it_fits)
    return event


@pytest.mark.parametrize("best", [slow("last"), "first"])
def test_adapter_is_written_where_no_checkpoint_fits(
    run: Run,
    worsening_run: Run,
    model: Path,
    chat: Path,
    gibberish: Path,
    tmp_path: Path,
    full: threading.Event,
    best: str,
) -> None:
    whole, options = run[0], {}
    if best == "first":
        whole, options = worsening_run[0], {"val_data": str(gibberish), "schedule": "constant"}
    given = config(model, chat, tmp_path, save_steps=1, keep=3, **options)

    def fill(record: StepRecord) -> None:
        if record.step == 3:
            full.set()

    with pytest.raises(OutputError) as error:
        train(given, on_step=fill)
    assert "the adapter is written; the last good checkpoint is" in str(error.value)
    assert str(error.value).endswith(f"resume with mlxtune train --resume {tmp_path}")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {ADAPTER, "adapter_config.json", "checkpoints"}
    assert (tmp_path / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    full.clear()
    assert mlxtune.resume(tmp_path).adapter is not None
    assert (tmp_path / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()


@pytest.mark.slow
def test_space_for_a_checkpoint_is_checked_before_the_first_step(
    deep_model: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=200_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    needed = ["train", "--model-path", deep_model, "--data", chat]
    needed += ["--output", tmp_path / "a" / ADAPTER]
    outcome = cli(*needed, "--rank", 64)
    assert outcome.code == 1
    assert re.search(r"a checkpoint takes about 3\d\d kB of disk, and 200 kB are free", outcome.err)
    assert "cannot be written: a checkpoint takes 3" in outcome.err.splitlines()[-1]
    assert not (tmp_path / "a").exists()
    fits = cli(*needed, "--rank", 8, "--max-steps", 1)
    assert fits.code == 0
    best = tmp_path / "a" / "checkpoints" / "epoch-1"
    size = sum(path.stat().st_size for path in best.iterdir())
    (about,) = re.findall(r"a checkpoint takes about (.*) kB of disk", fits.err)
    assert float(about) * 1000 <= size < float(about) * 1000 + 20_000
