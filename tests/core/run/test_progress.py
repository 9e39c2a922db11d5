"""The progress of a run, read back from its files, and metrics.jsonl on a failing disk."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mlxtune.config.limits import TooLargeError
from mlxtune.core.run.metrics import SkippedStep, StepRecord, ValidationRecord
from mlxtune.core.run.progress import (
    MetricsFile,
    Progress,
    Record,
    have_equal_results,
    parse_record,
    parse_records,
)
from tests.core.training.records import epoch_metrics, step_record


def step(number: int, epoch: int = 1) -> StepRecord:
    # The shortest exact form of this gradient norm has 17 digits.
    return step_record(number, epoch=epoch, loss=2.0 / number, grad_norm=0.1 + 0.2)


def skipped(number: int, epoch: int = 1) -> SkippedStep:
    return SkippedStep(number, epoch, 1e-4, "the loss is nan", ["chat.jsonl:4", "chat.jsonl:9"])


def validation(number: int, loss: float) -> ValidationRecord:
    return ValidationRecord(number, loss, 3.0)


def whole() -> list[Record]:
    """Return the progress of two epochs of two steps each, with one step skipped."""
    return [
        validation(0, 4.0),
        *(step(1), skipped(2), validation(2, 3.0), epoch_metrics(1, 3.0)),
        *(step(3, 2), step(4, 2), validation(4, 3.5), epoch_metrics(2, 3.5)),
    ]


def jsonl(progress: Progress) -> bytes:
    return b"".join(progress.lines(0, len(progress)))


def test_records_are_read_back_as_they_were_to_the_last_digit() -> None:
    content = jsonl(Progress(whole()))
    assert list(Progress.from_jsonl(content)) == whole()
    kinds = [json.loads(line)["kind"] for line in content.splitlines()]
    assert kinds == [
        "validation",
        *("step", "skipped", "validation", "epoch"),
        *("step", "step", "validation", "epoch"),
    ]


@pytest.mark.parametrize("metrics", [{}, {"reward": 0.5}], ids=str)
@pytest.mark.parametrize("is_of_rows", [False, True])
def test_line_says_what_a_loss_is_of_only_where_metrics_do_not(
    metrics: dict[str, float], is_of_rows: bool
) -> None:
    """So the lines of earlier versions, which never said it, are read and written as before."""
    record = step_record(1, metrics=metrics, is_of_rows=is_of_rows)
    content = jsonl(Progress([record]))
    assert (b"is_of_rows" in content) is (is_of_rows is not bool(metrics))
    assert list(Progress.from_jsonl(content)) == [record]


def test_derived_values_follow_from_the_records() -> None:
    progress = Progress(whole())
    assert progress.step == 4
    assert [metrics.epoch for metrics in progress.epochs] == [1, 2]
    assert (progress.best, progress.best_epoch) == (validation(2, 3.0), 1)
    assert progress.validations_since_best == 1
    assert progress.initial_val_loss == 4.0
    assert progress.consecutive_skips == 0

    early = Progress(whole()[:3])
    assert (early.step, early.best, early.best_epoch, early.epochs) == (2, None, None, [])
    assert early.validations_since_best == 0
    assert early.consecutive_skips == 1
    none = Progress()
    assert (none.step, none.best, none.initial_val_loss) == (0, None, None)


def test_first_of_equal_validations_after_training_is_best() -> None:
    progress = Progress([validation(0, 1.0), step(1), validation(1, 3.0), step(2, 2)])
    progress.append(validation(2, 3.0))
    assert (progress.best, progress.best_epoch) == (validation(1, 3.0), 1)
    assert Progress([validation(0, 1.0)]).best is None


def test_best_validation_is_placed_at_an_epoch_only_if_it_ends_one() -> None:
    """A later validation may have the same loss, as rewards often do."""
    within = [step(1), validation(1, 3.0), step(2), validation(2, 3.0), epoch_metrics(1, 3.0)]
    assert Progress(within).best_place == "step 1 (epoch 1)"
    assert Progress(within[2:]).best_place == "epoch 1"


def test_validation_after_skipped_steps_alone_is_of_their_epoch() -> None:
    progress = Progress([step(1), epoch_metrics(1, None), skipped(2, 2), validation(2, 3.0)])
    progress.append(step(3, 3))
    assert progress.best_epoch == 2


@pytest.mark.parametrize(
    ("steps_per_epoch", "total", "left"),
    # Step 4 ends an epoch, the run, or neither.
    [(2, 10, 9), (4, 10, 9), (3, 4, 9), (3, 5, 7)],
)
def test_shortened_epochs_end_is_undone_when_the_run_is_extended(
    steps_per_epoch: int, total: int, left: int
) -> None:
    progress = Progress(whole())
    progress.reopen_epoch(steps_per_epoch, total)
    assert list(progress) == whole()[:left]
    assert progress[-1] == whole()[left - 1]


def test_validation_at_a_cut_stays_where_a_longer_run_has_it_too() -> None:
    progress = Progress(whole())
    progress.reopen_epoch(3, 5, validated=True)
    assert list(progress) == whole()[:8]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "not a record"),
        ("[]", "not a record"),
        ("{", "not a record"),
        ("[" * 100_000, "not a record"),
        ('{"kind": "other"}', "not a record"),
        ('{"kind": "step", "step": 5}', "not a record"),
        *(
            (json.dumps({"kind": kind, **vars(record), **wrong}), f"its {next(iter(wrong))} is")
            for kind, record, wrong in [
                ("validation", validation(5, 1.0), {"step": "5"}),
                ("validation", validation(5, 1.0), {"step": -1}),
                ("validation", validation(5, 1.0), {"step": True}),
                ("validation", validation(5, 1.0), {"val_loss": None}),
                ("skipped", skipped(5), {"rows": [[[]]]}),
                ("step", step(5), {"tokens": 10**30}),
                ("step", step(5), {"loss": 10**400}),
            ]
        ),
        (jsonl(Progress([step(6)])).decode().strip(), "is step 6, not 5"),
        (jsonl(Progress([step(4)])).decode().strip(), "is step 4, not 5"),
    ],
)
def test_invalid_record_is_an_error_that_names_the_line(line: str, problem: str) -> None:
    content = jsonl(Progress(whole())) + line.encode() + b"\n"
    with pytest.raises(ValueError, match=problem) as raised:
        Progress.from_jsonl(content)
    assert "line 10" in str(raised.value)
    with pytest.raises(ValueError, match="utf-8"):
        Progress.from_jsonl(b"\xff")


def test_runs_are_equal_regardless_of_timing() -> None:
    slower = [replace(step(1), seconds=9.0), replace(epoch_metrics(1, 3.0), epoch_time_ms=99)]
    assert have_equal_results(slower, [step(1), epoch_metrics(1, 3.0)])
    otherwise = replace(step(1), memory=10**9, micro_batches=4, run_tokens=120, padding=20)
    assert have_equal_results([otherwise], [step(1)])
    assert not have_equal_results([step(1)], [replace(step(1), loss=2.1)])
    assert not have_equal_results([step(1)], [step(1), step(2)])


# The file


def test_file_gains_a_line_for_each_record_and_other_content_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("of an earlier run\n")
    warnings: list[str] = []
    progress, file = Progress(), MetricsFile(tmp_path, warnings.append)
    inodes = set()
    for record in whole():
        progress.append(record)
        file.write(progress)
        assert path.read_bytes() == jsonl(progress)
        inodes.add(path.stat().st_ino)
    assert len(inodes) == 1, "records are appended; the file is not rewritten each time"
    # Another program changes or removes the file.
    path.write_bytes(path.read_bytes() + b"x")
    progress.append(step(5, 3))
    file.write(progress)
    assert path.read_bytes() == jsonl(progress)
    path.unlink()
    file.write(progress)
    assert path.read_bytes() == jsonl(progress)
    assert warnings == []


def test_file_is_completed_once_writing_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    progress, file = Progress([step(1)]), MetricsFile(tmp_path, warnings.append)
    file.write(progress)

    def fails(path: Path) -> object:
        with path.open("ab") as stream:
            stream.write(b'{"kind": "st')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(self: Path, *args: object, **options: object) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("mlxtune.core.run.progress.open_to_append", fails)
        for number in (2, 3):
            progress.append(step(number))
            file.write(progress)
            patch.setattr(Path, "open", full)
    assert len(warnings) == 1
    assert "metrics.jsonl cannot be written" in warnings[0]
    progress.append(step(4))
    file.write(progress)
    assert (tmp_path / "metrics.jsonl").read_bytes() == jsonl(progress)


def test_each_new_failure_is_a_warning_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    progress, file = Progress([step(1)]), MetricsFile(tmp_path / "file" / "run", warnings.append)
    file.write(progress)
    file.write(progress)
    assert len(warnings) == 1
    assert str(tmp_path / "file") in warnings[0]

    (tmp_path / "file").unlink()
    file.write(progress)
    (tmp_path / "file" / "run" / "metrics.jsonl").unlink()
    (tmp_path / "file" / "run").rmdir()
    (tmp_path / "file" / "run").write_text("")
    file.write(progress)
    assert len(warnings) == 2


def test_overlong_record_is_refused_before_parsing() -> None:
    names = ", ".join(f'"{i}": 1.0' for i in range(20_000))
    line = f'{{"kind": "step", "step": 1, "metrics": {{{names}}}}}'.encode()
    with pytest.raises(ValueError, match="too long"):
        parse_record(line)


# Files that only a stranger writes


def many_metrics(number: int, metrics: int) -> bytes:
    record = replace(step(number), metrics={str(i): 0.5 for i in range(metrics)})
    return jsonl(Progress([record]))


def test_step_of_many_metrics_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = many_metrics(1, 5000)
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("was parsed"))
    with pytest.raises(ValueError, match="it has more than 100 values"):
        parse_record(line)


def test_metrics_of_all_steps_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtune.core.run.progress.MAX_METRIC_VALUES", 250)
    lines = [many_metrics(number, 50) for number in range(1, 7)]
    assert len(Progress.from_jsonl(b"".join(lines[:5]))) == 5
    with pytest.raises(TooLargeError, match=r"metrics\.jsonl has more than 250 metrics of steps"):
        Progress.from_jsonl(b"".join(lines))


def test_values_besides_steps_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtune.core.run.progress.MAX_OTHER_VALUES", 250)
    record = ValidationRecord(1, 1.0, 3.0, {str(i): 0.5 for i in range(90)})
    lines = [jsonl(Progress([record]))] * 3
    assert len(list(parse_records(b"".join(lines[:2])))) == 2
    with pytest.raises(TooLargeError, match="more than 250 values besides steps"):
        list(parse_records(b"".join(lines)))
