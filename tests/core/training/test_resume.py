"""A run that is stopped anywhere and resumed equals the uninterrupted run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.corpus import Corpus
from mlxtune.core.run.metrics import InstructTrainResult, SkippedStep
from mlxtune.core.run.run_folder import find_resume_point
from mlxtune.core.steps.order import steps_of
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import MemoryLimitError, NonFiniteLossError, OutputError, TrainingInterrupted
from tests.core.training.fake_pipeline import (
    CORPUS,
    FakePipeline,
    log_of,
    metadata,
    names_in,
    options,
    without_times,
)
from tests.faults import KINDS, Crash, FaultyDisk
from tests.slow import long, slow

# Validation losses of a run of four epochs; the second is the best.
LOSSES = [4.0, 3.0, 1.0, 2.0, 2.0]


def pipeline() -> FakePipeline:
    """Return a pipeline whose validation losses depend only on the step, not on earlier calls."""
    made = FakePipeline()
    made._val_loss = lambda v: LOSSES[-(-len(made.batches) // 3)]
    return made


def run(
    folder: Path,
    *,
    resume: bool = False,
    observer: TrainingObserver | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    **changes: Any,
) -> tuple[InstructTrainResult, FakePipeline]:
    """Train or resume, or start over if there is no checkpoint."""
    made = pipeline()
    config = options(folder, **{"epochs": 4, "save_steps": 2, "keep": 2} | changes)
    trainer = InstructTrainer(made, CORPUS, config, observer=observer, should_stop=should_stop)
    found = find_resume_point(folder) if resume else None
    return trainer.train({"ledger.json": {"rows": 10}}, resume=found), made


def what_counts(result: InstructTrainResult, made: FakePipeline, folder: Path) -> dict[str, Any]:
    """Return all results of a run, except times and the steps at which it saved."""
    numbered = {path.name for name in ("step-*", "epoch-*") for path in folder.glob(name)}
    assert len(numbered) <= 2
    return {
        "batches": made.batches,
        "learning rates": made.learning_rates,
        "metrics": without_times(log_of(folder)),
        "best": (result.best_epoch, result.best_val_loss, metadata(folder / "best")["epoch"]),
        "adapter": (folder / "best" / "adapters.safetensors").read_text(),
        "initial": result.initial_val_loss,
        "steps": [(record.step, record.loss) for record in result.steps],
        "stopped early": result.stopped_early,
        "files": names_in(folder) - numbered - {"previous-1"},
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return what_counts(*run(folder), folder)


@pytest.mark.parametrize("every", [3, slow(1)])
def test_run_stopped_after_any_step_and_resumed_is_the_whole_run(
    tmp_path: Path, uninterrupted: dict[str, Any], every: int
) -> None:
    for stop_at in range(1, 100, every):
        folder, asked = tmp_path / str(stop_at), 0

        def should_stop(stop_at: int = stop_at) -> bool:
            nonlocal asked
            asked += 1
            return asked == stop_at

        try:
            run(folder, should_stop=should_stop)
        except TrainingInterrupted:
            found = what_counts(*run(folder, resume=True), folder)
            assert found == uninterrupted
        else:
            break
    assert stop_at > 12


# Kinds of failure, each with N to try one in N operations; the remaining operations reach the same
# code.
EVERY = [("crash", 29), ("ENOSPC", 67)]
EVERY += [slow("crash", 7), slow("ENOSPC", 13), slow("EIO", 31), slow("EACCES", 31)]
EVERY += [long("crash", 1), long("ENOSPC", 2), long("EIO", 5), long("EACCES", 5)]


@pytest.mark.parametrize(("kind", "every"), EVERY)
def test_run_whose_disk_fails_at_any_operation_loses_nothing(
    tmp_path: Path, kind: str, every: int
) -> None:
    shorter = {"epochs": 3, "save_steps": 4}
    expected = what_counts(*run(tmp_path / "whole", **shorter), tmp_path / "whole")
    ended = []
    for fails_at in range(1, 2000, every):
        folder = tmp_path / str(fails_at)
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = FaultyDisk(monkeypatch, fails_at, KINDS[kind])
            try:
                run(folder, **shorter)
            except (Crash, OutputError):
                ended.append(fails_at)
        found = what_counts(*run(folder, resume=True, **shorter), folder)
        assert found == expected, f"operation {fails_at}"
        shutil.rmtree(folder)
        if not disk.failed:
            break
    assert fails_at > 120
    # A single failure of the disk ends a run only before its first files are complete.
    assert len(ended) == (fails_at - 1) // every if kind == "crash" else max(ended, default=0) < 20


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("error", [OutputError, MemoryLimitError, KeyboardInterrupt])
def test_error_before_a_resumed_run_is_restored_names_its_checkpoint(
    tmp_path: Path, error: type[BaseException], numbered: bool
) -> None:
    run(tmp_path)
    if not numbered:
        for path in (*tmp_path.glob("step-*"), *tmp_path.glob("epoch-*")):
            shutil.rmtree(path)

    class Broken(FakePipeline):
        def restore(self, folder: Path) -> None:
            raise error("broken")

    point = find_resume_point(tmp_path)
    assert point is not None
    trainer = InstructTrainer(Broken(), CORPUS, options(tmp_path, epochs=4))
    with pytest.raises(error) as raised:
        trainer.train(resume=point)
    assert f"checkpoint is {point.checkpoint.folder}; resume with" in str(raised.value)


def test_resume_uses_newest_good_checkpoint_and_explains_others(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    def spoil(folder: Path) -> None:
        path = folder / "adapters.safetensors"
        path.write_bytes(bytes(len(path.read_bytes())))

    # After the first step of the third epoch, epoch-2 and step-7 are kept.
    stopped = tmp_path / "stopped"
    with pytest.raises(TrainingInterrupted):
        run(stopped, should_stop=stops_after(7))
    assert {"epoch-2", "step-7", "best"} <= names_in(stopped)

    for spoiled, expected in (
        ([], "step-7"),
        (["step-7"], "epoch-2"),
        (["step-7", "epoch-2"], "best"),
        # Without the best checkpoint, later checkpoints are useless, but epoch-2 is itself the
        # best.
        (["best"], "epoch-2"),
    ):
        folder = tmp_path / "-".join(["copy", *spoiled])
        shutil.copytree(stopped, folder)
        for name in spoiled:
            spoil(folder / name)
        found = find_resume_point(folder)
        assert found is not None
        assert found.checkpoint.folder.name == expected
        for name in spoiled:
            assert "SHA-256" in found.skipped[folder / name]
        assert what_counts(*run(folder, resume=True), folder) == uninterrupted

    for name in ("step-7", "epoch-2", "best"):
        spoil(stopped / name)
    with pytest.raises(OutputError, match=r"step-7: adapters\.safetensors has changed"):
        find_resume_point(stopped)


def stops_after(step: int) -> Callable[[], bool]:
    """Return a function that requests a stop after `step`, in a run of 8 rows in steps of 3."""
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        # Each validation asks twice too: at the start, and after every third step.
        return asked == 2 + step + 2 * ((step - 1) // 3)

    return should_stop


def test_folder_without_checkpoints_has_nothing_to_resume(tmp_path: Path) -> None:
    assert find_resume_point(tmp_path) is None
    assert find_resume_point(tmp_path / "none") is None
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "adapters.safetensors").write_text("of another tool")
    assert find_resume_point(tmp_path) is None


def test_run_with_more_epochs_continues_where_the_shorter_one_ended(tmp_path: Path) -> None:
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    steady = {"schedule": "constant"}
    expected = what_counts(*run(whole, epochs=3, **steady), whole)
    run(grown, epochs=1, **steady)
    found = what_counts(*run(grown, epochs=3, resume=True, **steady), grown)
    assert found == expected


def test_extended_run_removes_end_of_truncated_epoch(
    tmp_path: Path,
) -> None:
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    steady = {"schedule": "constant", "epochs": 2}
    expected = what_counts(*run(whole, **steady), whole)
    run(grown, max_steps=2, **steady)
    assert log_of(grown)[-1]["kind"] == "epoch"
    found = what_counts(*run(grown, resume=True, **steady), grown)
    assert found == expected


def test_validation_at_cut_counts_if_adapter_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the validation did not count, `best/` would contain an adapter that the record lacks."""
    losses = {0: 4.0, 3: 3.0, 5: 1.0, 6: 2.0, 9: 2.0}

    def pipeline() -> FakePipeline:
        made = FakePipeline()
        made._val_loss = lambda v: losses[len(made.batches)]
        return made

    monkeypatch.setitem(globals(), "pipeline", pipeline)
    steady = {"schedule": "constant", "epochs": 3}
    run(tmp_path, max_steps=5, **steady)
    result, _ = run(tmp_path, resume=True, **steady)
    assert result.best_step == metadata(tmp_path / "best")["step"] == 5
    assert [validation.step for validation in result.validations] == [0, 3, 5, 6, 9]


def test_finished_run_resumed_is_finished(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    run(tmp_path)
    result, made = run(tmp_path, resume=True)
    assert what_counts(result, made, tmp_path) == uninterrupted


def test_early_stopping_counts_epochs_from_before_the_pause(tmp_path: Path) -> None:
    whole, paused = tmp_path / "whole", tmp_path / "paused"
    patience = {"early_stopping_patience": 1}
    expected = what_counts(*run(whole, **patience), whole)
    assert expected["stopped early"]
    with pytest.raises(TrainingInterrupted):
        run(paused, should_stop=stops_after(7), **patience)
    assert what_counts(*run(paused, resume=True, **patience), paused) == expected


class Diverging(FakePipeline):
    """A pipeline whose loss is not finite at some steps."""

    def __init__(self, steps: set[int]) -> None:
        super().__init__()
        self.diverges = steps
        self.taken = 0

    def train_batch(self, examples: Any, *, step: int, learning_rate: float) -> Any:
        if step in self.diverges:
            raise NonFiniteLossError(f"step {step}: the loss is nan")
        self.taken += 1
        # FakePipeline requires consecutive step numbers, so skipped steps must not count.
        return super().train_batch(examples, step=len(self.batches) + 1, learning_rate=1.0)


def test_non_finite_step_is_skipped_and_reported_with_its_rows(tmp_path: Path) -> None:
    problems: list[str] = []

    class Observer(TrainingObserver):
        def on_problem(self, message: str) -> None:
            problems.append(message)

    made = Diverging({2, 3, 5})
    corpus = Corpus.of(CORPUS)
    corpus.paths = ["chat.jsonl"]
    trainer = InstructTrainer(made, corpus, options(tmp_path), observer=Observer())
    result = trainer.train()

    assert [record.step for record in result.steps] == [1, 4, 6]
    assert made.taken == 3
    assert len(problems) == 3
    skipped = [line for line in log_of(tmp_path) if line["kind"] == "skipped"]
    assert [line["step"] for line in skipped] == [2, 3, 5]
    for line, problem in zip(skipped, problems, strict=True):
        assert all(row.startswith("chat.jsonl:") for row in line["rows"])
        numbers = [row.removeprefix("chat.jsonl:") for row in line["rows"]]
        assert f"its rows: chat.jsonl:{', '.join(numbers)};" in problem
        assert line["reason"] in problem
    rows = trainer.train_rows
    second = [f"chat.jsonl:{rows[i][0].row}" for i in steps_of(rows, 3, "shuffle", 42, 1)[1]]
    assert skipped[0]["rows"] == second


@pytest.mark.parametrize(("policy", "steps_taken"), [("skip", 1), ("stop", 1)])
def test_three_non_finite_steps_end_a_run_across_resume(
    tmp_path: Path, policy: str, steps_taken: int
) -> None:
    config = options(tmp_path, on_nonfinite=policy, save_steps=1)
    first = InstructTrainer(Diverging({2, 3, 4}), CORPUS, config)
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan; its rows: row ") as end:
        first.train()
    assert len(first.metrics.history) == steps_taken
    assert ("3 steps in a row" in str(end.value)) == (policy == "skip")

    found = find_resume_point(tmp_path)
    assert found is not None
    skipped_before = sum(isinstance(record, SkippedStep) for record in found.progress)
    again = InstructTrainer(Diverging({2, 3, 4}), CORPUS, config)
    with pytest.raises(NonFiniteLossError):
        again.train(resume=found)
    assert skipped_before == (2 if policy == "skip" else 0)
    assert again.progress.consecutive_skips == (3 if policy == "skip" else 1)


def test_epoch_without_a_finite_step_is_an_error_and_no_epoch_of_loss_zero(tmp_path: Path) -> None:
    config = options(tmp_path, batch_size=8)
    with pytest.raises(NonFiniteLossError, match="no step of epoch 1"):
        InstructTrainer(Diverging({1}), CORPUS, config).train()


def test_checkpoint_contains_the_whole_state_of_a_run(tmp_path: Path) -> None:
    run(tmp_path)
    folder = tmp_path / "epoch-4"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"].keys() == names_in(folder) - {"manifest.json"}
    assert {"adapters.safetensors", "optimizer.safetensors", "metadata.json"} <= names_in(folder)
    assert without_times(log_of(folder)) == without_times(log_of(tmp_path))
    assert log_of(folder)[-1]["kind"] == "epoch"
