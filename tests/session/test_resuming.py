"""`mlxtune train --resume`: its requirements, refusals and messages."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtune import ConfigError, TrainConfig, TrainingInterrupted, resume
from mlxtune import train as run_training
from mlxtune.backend.workers import launch
from mlxtune.commands.verify import verify
from mlxtune.core.run.checkpoint import FACTS
from mlxtune.session import resuming
from tests.command import ROWS, Cli, Outcome, files_in, finish, read_until, start
from tests.configs import train_to
from tests.models import sums, write_chat, write_model
from tests.slow import slow

OPTIONS = ("--epochs", "3", "--lr", "1e-2", "--targets", "all", "--dropout", "0.1")
_TIMES = (
    *("seconds", "epoch_time_ms", "samples_per_sec"),
    *("memory", "micro_batches", "run_tokens", "padding"),
)


def metrics_of(output: Path) -> list[dict[str, Any]]:
    lines = (output.parent / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in _TIMES} for line in lines]


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate Ctrl-C during a step."""
    from mlxtune.backend.step.pipeline import InstructPipeline

    whole = InstructPipeline.start_batch

    def interrupted(self: Any, examples: Any, *, step: int, **options: Any) -> Any:
        if step == at:
            signal.raise_signal(signal.SIGINT)
        return whole(self, examples, step=step, **options)

    at = step
    monkeypatch.setattr(InstructPipeline, "start_batch", interrupted)


@pytest.fixture(scope="module")
def stopped_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after its sixth step of twelve, for tests to copy."""
    folder = tmp_path_factory.mktemp("stopped")
    config = run_config(model, write_chat(folder / "chat.jsonl", sums(ROWS)), folder / "out")
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after(6, monkeypatch)
        with pytest.raises(TrainingInterrupted):
            run_training(config)
    return folder / "out"


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of an uninterrupted run with the options of `stopped_run`."""
    folder = tmp_path_factory.mktemp("whole")
    config = run_config(model, write_chat(folder / "chat.jsonl", sums(ROWS)), folder)
    run_training(config)
    return folder / "adapters.safetensors"


def run_config(model: Path, chat: Path, folder: Path) -> TrainConfig:
    return TrainConfig(
        model_path=str(model),
        data=str(chat),
        output=str(folder / "adapters.safetensors"),
        epochs=3,
        lr=1e-2,
        targets=("all",),
        dropout=0.1,
        samples=0,
        quiet=True,
    )


@pytest.fixture
def stopped(stopped_run: Path, output: Path) -> Path:
    """The checkpoints of a run stopped after its sixth step of twelve."""
    return Path(shutil.copytree(stopped_run, output.parent)) / "checkpoints"


def test_resumed_run_needs_no_other_option_and_ends_as_the_whole_run(
    cli: Cli, stopped: Path, output: Path, whole: Path
) -> None:
    outcome = cli("train", "--resume", stopped)
    assert (outcome.code, outcome.out) == (0, "")
    assert output.read_bytes() == whole.read_bytes()
    assert metrics_of(output) == metrics_of(whole)
    config = "adapter_config.json"
    assert (output.parent / config).read_bytes() == (whole.parent / config).read_bytes()


def test_resumed_run_reports_where_it_continues(cli: Cli, train: Cli, output: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after(6, monkeypatch)
        assert train(*OPTIONS, quiet=False).code == 130
    checkpoints = output.parent / "checkpoints"
    # --resume also accepts the adapter's folder.
    outcome = cli("train", "--resume", output.parent)
    assert outcome.code == 0
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("Resume")]
    assert line.endswith(f"step 6 of 12, from {checkpoints / 'step-6'}")
    assert "before training" not in outcome.err
    assert "no step is left" not in outcome.err
    ended = cli("train", "--resume", output.parent, "--dry-run")
    assert "no step is left: raise --epochs to train further" in ended.err


def test_without_a_folder_the_run_is_where_the_checkpoints_would_be(
    cli: Cli, stopped: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(output.parent)
    assert cli("train", "--resume", "--quiet").code == 0
    assert output.is_file()


def test_unknown_option_of_a_resumed_run_names_ours(stopped: Path) -> None:
    with pytest.raises(ConfigError, match="unknown option 'iters': use max_steps=5"):
        resume(stopped, iters=5)


def test_run_is_resumed_from_python(stopped: Path, output: Path) -> None:
    result = resume(stopped, epochs=4)
    assert result.training is not None
    assert [metrics.epoch for metrics in result.training.epoch_metrics] == [1, 2, 3, 4]
    assert len(result.training.steps) == 16
    assert output.is_file()


def test_run_is_resumed_from_another_folder_and_after_it_was_moved(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_chat(home / "chat.jsonl", sums(20))
    monkeypatch.chdir(home)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(6, patch)
        relative = ["--model-path", os.path.relpath(model), "--data", "chat.jsonl", "--quiet"]
        assert cli("train", *relative, "--output", "out/a.safetensors", *OPTIONS).code == 130
    monkeypatch.chdir(tmp_path)
    shutil.move(home / "out", tmp_path / "moved")

    assert cli("train", "--resume", "moved").code == 0
    assert (tmp_path / "moved" / "a.safetensors").is_file()
    assert (tmp_path / "moved" / "checkpoints" / "result.json").is_file()
    assert not (home / "out").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--rank", 4], "--rank 4: the run has 8"),
        (["--targets", "q_proj"], "--targets q_proj: the run has all"),
        (["--lr", "1e-3", "--seed", 7], "--seed 7: the run has 42"),
        (["--template", "gemma"], "--template gemma: the run has auto"),
        (["--epochs", 2], "--epochs can only be raised (the run has 3)"),
        (["--max-seq-len", "many"], "--max-seq-len must be a whole number"),
        (["--save-minutes", -1], "--save-minutes must be at least 0"),
        (["--val-steps", 2], "--val-steps 2: the run has the default (only at its end)"),
        (
            ["--max-steps", 2],
            "--max-steps: the run has no such limit, and may not get shorter: leave it out",
        ),
    ],
)
def test_option_that_would_change_the_result_is_an_error_that_names_it(
    cli: Cli, stopped: Path, options: list[object], problem: str
) -> None:
    before = sorted(stopped.rglob("*"))
    outcome = cli("train", "--resume", stopped, *options)
    assert outcome.code == 2
    assert problem in outcome.error
    assert sorted(stopped.rglob("*")) == before


def test_options_without_effect_on_the_result_are_accepted(
    cli: Cli, stopped: Path, output: Path, whole: Path
) -> None:
    given = ["--save-steps", 2, "--keep", 1, "--memory-limit", 12, "--rank", 8, "--lr", "0.01"]
    assert cli("train", "--resume", stopped, *given).code == 0
    assert output.read_bytes() == whole.read_bytes()
    assert len(list(stopped.glob("step-*")) + list(stopped.glob("epoch-*"))) == 1


@pytest.mark.parametrize(
    "options",
    [
        # The best validation is before the stop.
        {"lr": 30.0, "schedule": "constant", "val_steps": 1, "max_steps": 3},
        {"objective": "dpo", "no_cache": True, "lr": 3e-3, "max_steps": 3},
        # The run stops within a rollout.
        slow(
            {"objective": "grpo", "updates": 2, "kl": 0.1, "lr": 3e-2, "max_steps": 4}
            | {"max_new_tokens": 9, "group_size": 4, "batch_size": 2}
        ),
    ],
)
def test_resumed_run_with_another_output_stays_in_its_folder(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    rows: list[Any] = sums(ROWS)
    if "objective" in options:
        rows = [
            {"prompt": question, "chosen": answer, "rejected": "No idea."}
            for (_, question), (_, answer) in rows
        ]
    more: dict[str, Any] = {}
    if "updates" in options:
        reward = tmp_path / "low.py"
        reward.write_text(
            "def reward(prompt, completion, row): return sum(map(str.isascii, completion)) / 9"
        )
        # A copy of the run chooses no code to run.
        more = {"reward": (str(reward),)}
    config = run_config(model, write_chat(tmp_path / "chat.jsonl", rows), tmp_path / "run")
    with pytest.raises(TrainingInterrupted):
        train_to(replace(config, dropout=0.0, **options, **more), 1)
    run, in_place, elsewhere = (tmp_path / name for name in ("run", "in place", "elsewhere"))
    shutil.copytree(run, in_place)
    expected = resume(in_place, **more).adapter
    assert expected is not None

    with pytest.raises(ConfigError, match="a run resumes in its own folder: leave it out, or copy"):
        resume(run, output=elsewhere, checkpoint_dir=elsewhere / "checkpoints", **more)
    assert not elsewhere.exists()
    for given in ({}, {"checkpoint_dir": run / "checkpoints"}):
        result = resume(run, output=elsewhere, **given, **more)
        assert result.checkpoint_dir == run / "checkpoints"
        assert files_in(elsewhere) == ["adapter_config.json", expected.name]
        assert (elsewhere / expected.name).read_bytes() == expected.read_bytes()
        assert files_in(run / "checkpoints") == files_in(expected.parent / "checkpoints")
        assert verify(run).ok
        with pytest.raises(ConfigError, match="outside its own folder: pass --output again"):
            resume(run, **more)
        shutil.rmtree(elsewhere)


@pytest.mark.parametrize("place", [(), ("--output", "elsewhere")])
@pytest.mark.parametrize("fault", ["a hard link", "read-only"])
def test_run_in_a_folder_that_is_not_ours_is_resumed_in_a_copy(
    cli: Cli,
    stopped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[str, ...],
    fault: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(stopped, copy / "checkpoints")
    if fault == "read-only":

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        why = f"{stopped} cannot be written: Permission denied"
        monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    else:
        why = f"{stopped} holds run.json, not written by mlxtune"
        os.link(stopped / "run.json", tmp_path / "another name")
    error = cli("train", "--resume", stopped, *place).error
    assert error == f"{why}: copy the run's folder, and resume the copy"
    assert not (tmp_path / "elsewhere").exists()
    monkeypatch.undo()
    assert cli("train", "--resume", copy, "--quiet").code == 0


def test_other_data_is_an_error_but_moved_data_is_accepted(
    cli: Cli, train: Cli, chat: Path, tmp_path: Path, output: Path
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after(6, monkeypatch)
        assert train(*OPTIONS).code == 130
    stopped = output.parent / "checkpoints"
    other = write_chat(tmp_path / "other.jsonl", sums(21))
    assert "--data" in cli("train", "--resume", stopped, "--data", other).error
    outcome = cli("train", "--resume", stopped, "--val-data", other)
    assert outcome.code == 1
    assert "error: --val-data gives different examples" in outcome.err

    moved = Path(shutil.move(chat, tmp_path / "moved.jsonl"))
    assert "chat.jsonl" in cli("train", "--resume", stopped).error
    assert cli("train", "--resume", stopped, "--data", moved).code == 0
    assert output.is_file()


def test_changed_data_is_counted_by_file_with_a_remedy(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    parts = sums(ROWS)[:12], sums(ROWS)[12:]
    for file, rows in zip(files, parts, strict=True):
        write_chat(file, rows)
    run_training(
        model_path=model, data=files, output=tmp_path / "out", samples=0, quiet=True, max_steps=2
    )
    checkpoint = tmp_path / "out" / "checkpoints" / "epoch-1"

    def refused() -> str:
        return cli("train", "--resume", tmp_path / "out", "--max-steps", 3).error

    # All but the last rows of the file, which may be held out, differ.
    changed = [row for row in sums(2 * ROWS) if row not in sums(ROWS)][: len(parts[1])]
    write_chat(files[1], changed)
    error = refused()
    found = re.search(rf"trained on; (\d) rows of {files[1]} changed: bring back", error)
    trained = json.loads((checkpoint.parent / "ledger.json").read_text())[1]["rows_train"]
    assert found is not None and int(found[1]) == trained
    assert error.endswith(f"--init-adapter {checkpoint}")
    assert str(files[0]) not in error

    write_chat(files[1], parts[1][:-1])
    assert f"; {files[1]} had 8 rows to use, and has 7: bring back" in refused()
    (checkpoint.parent / "ledger.json").write_text("damaged")
    assert "than the run was trained on: bring back" in refused()

    write_chat(files[1], parts[1])
    assert cli("train", "--resume", tmp_path / "out", "--max-steps", 3).code == 0


def test_resumed_runs_and_workers_compare_the_same_facts(
    stopped: Path,
) -> None:
    metadata = json.loads((stopped / "step-6" / "metadata.json").read_text())
    assert {*FACTS} - metadata.keys() == {"reward_hash"}
    assert resuming._FACT_PROBLEMS.keys() == {*FACTS}
    assert launch._COMMON_FACTS.keys() - {"versions", "options", "step"} == {*FACTS}


def test_other_weights_are_an_error(cli: Cli, stopped: Path, model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    other = write_model(tmp_path / "other", "qwen3", seed=1, num_hidden_layers=1)
    error = cli("train", "--resume", stopped, "--model-path", other).error
    assert error.startswith("--model-path: its weights differ from those")
    # A copy with equal weights is the same model.
    assert cli("train", "--resume", stopped, "--model-path", copy).code == 0


@pytest.mark.parametrize(
    ("place", "problem"),
    [("none", "no such folder"), ("empty", "holds no run"), ("run/best", "can be used: best")],
)
def test_folder_without_a_run_is_an_error(
    cli: Cli, tmp_path: Path, place: str, problem: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "best").mkdir(parents=True)
    (tmp_path / "run" / "best" / "manifest.json").write_text("{}")
    outcome = cli("train", "--resume", tmp_path / place)
    assert outcome.code == 1
    assert problem in outcome.error


def test_unfinished_run_is_not_overwritten_unless_asked(train: Cli, stopped: Path) -> None:
    before = (stopped / "metrics.jsonl").read_bytes()
    error = train(*OPTIONS).error
    assert f"mlxtune train --resume {stopped.parent}, or" in error
    assert "--overwrite" in error
    assert (stopped / "metrics.jsonl").read_bytes() == before

    short = (*OPTIONS, "--max-steps", 1)
    assert train(*short, "--overwrite").code == 0
    assert (stopped / "previous-1" / "metrics.jsonl").read_bytes() == before
    # A finished run is archived even without --overwrite.
    assert train(*short).code == 0


def test_damaged_checkpoint_is_skipped_and_named(cli: Cli, stopped: Path, output: Path) -> None:
    weights = stopped / "step-6" / "optimizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    outcome = cli("train", "--resume", stopped)
    assert outcome.code == 0
    (warning,) = outcome.err.splitlines()
    assert warning.startswith(f"warning: {stopped / 'step-6'} cannot be used: optimizer")
    assert output.is_file()


def test_finished_run_is_finished_also_when_resumed(cli: Cli, own_run: Path, output: Path) -> None:
    adapter = output.read_bytes()
    output.unlink()
    assert cli("train", "--resume", output.parent).code == 0
    assert output.read_bytes() == adapter


def test_dry_run_of_a_resume_changes_nothing(cli: Cli, stopped: Path, output: Path) -> None:
    def listing() -> list[tuple[Path, int]]:
        files = (path for path in output.parent.rglob("*") if path.is_file())
        return sorted((path, path.stat().st_mtime_ns) for path in files)

    before = listing()
    assert cli("train", "--resume", stopped, "--dry-run").code == 0
    assert listing() == before


@pytest.mark.slow
def test_run_killed_in_a_validation_within_an_epoch_ends_as_the_whole_run(
    cli: Cli, train: Cli, model: Path, chat: Path, output: Path, tmp_path: Path
) -> None:
    # Many rows, so that the validation after step 6 still runs when the run is killed.
    held_out = write_chat(tmp_path / "held_out.jsonl", sums(40))
    options = [*OPTIONS, "--max-steps", 8, "--val-steps", 2, "--val-data", held_out, "--samples", 0]
    whole = tmp_path / "whole" / "adapters.safetensors"
    assert train(*options, "--output", whole).code == 0

    paths = ["--model-path", model, "--data", chat, "--output", output]
    # This seed changes the order of sets, on which the result must not depend.
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    process = start("train", *paths, *options, "--log-every", 1, env=environment)
    read_until(process, "step 6/")
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert "step-4" in {path.name for path in (output.parent / "checkpoints").iterdir()}
    assert cli("train", "--resume", output.parent, "--quiet").code == 0
    assert output.read_bytes() == whole.read_bytes()
    assert metrics_of(output) == metrics_of(whole)


def test_second_run_in_a_folder_is_refused_with_the_holder(
    train: Cli, model: Path, chat: Path, output: Path
) -> None:
    paths = ["--model-path", model, "--data", chat, "--output", output]
    first = start("train", *paths, "--epochs", 10_000, "--patience", 10_000, "--log-every", 1)
    read = read_until(first, "step 3/")
    error = train().error
    assert f"process {first.pid} is training here" in error
    assert train("--overwrite").error == error
    # The first run must continue.
    read += read_until(first, "step 9/")
    first.send_signal(signal.SIGKILL)
    finish(first)
    # The killed run no longer locks its folder or reserves memory.
    assert "resume it with mlxtune train --resume" in train().error


def test_run_that_has_ended_holds_no_lock_any_more(model: Path, chat: Path, tmp_path: Path) -> None:
    config = replace(run_config(model, chat, tmp_path), max_steps=2)
    run_training(config)
    run_training(config)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after(1, monkeypatch)
        with pytest.raises(TrainingInterrupted):
            run_training(config)
    assert not list(tmp_path.rglob(".mlxtune.lock"))


def test_checkpoints_that_are_all_damaged_are_an_error_that_says_how(
    stopped: Path, cli: Cli
) -> None:
    (stopped / "step-6" / "manifest.json").write_text("[" * 100_000)
    (stopped / "best" / "manifest.json").write_text('{"format": 1, "files": {"../x": 1}}')
    (stopped / "epoch-1" / "manifest.json").write_bytes(b"\xff\x00")
    outcome: Outcome = cli("train", "--resume", stopped)
    assert outcome.code == 1
    assert "none of its checkpoints can be used" in outcome.error


def test_run_over_weighted_files_is_resumed_to_the_same_adapter(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    write_chat(tmp_path / "a.jsonl", sums(20)[:12])
    write_chat(tmp_path / "b.jsonl", sums(20)[12:])
    data = [f"--data={tmp_path / 'a.jsonl'}=1.5", "--data", tmp_path / "b.jsonl"]
    options = ["--model-path", model, *data, "--samples", 0, "--quiet", *OPTIONS]
    assert cli("train", *options, "--output", tmp_path / "whole").code == 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after(6, monkeypatch)
        assert cli("train", *options, "--output", tmp_path / "out").code == 130

    plain = ["--data", tmp_path / "a.jsonl", *data[1:]]
    changed = cli("train", "--resume", tmp_path / "out", *plain)
    problem = "--data gives different examples than the run was trained on"
    assert changed.error.startswith(problem)
    assert cli("train", "--resume", tmp_path / "out").code == 0

    adapters = [tmp_path / name / "adapters.safetensors" for name in ("whole", "out")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    ledgers = json.loads((tmp_path / "out/checkpoints/ledger.json").read_text())
    assert [ledger.get("weight", 1) for ledger in ledgers] == [1.5, 1]
    result = json.loads((tmp_path / "out/checkpoints/result.json").read_text())
    assert len(result["best_val_loss_of_files"]) == 2
