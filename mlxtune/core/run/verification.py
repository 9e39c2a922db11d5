"""Checks of a run that need only its files."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlxtune.config import OPTIONS
from mlxtune.config.fields import flag
from mlxtune.config.option import Affects
from mlxtune.core.evaluation.outcome import VERDICTS
from mlxtune.core.files.reading import file_hash, read_json, read_own
from mlxtune.core.formatting import count
from mlxtune.core.objectives.preference_rows import check_references
from mlxtune.core.run.checkpoint import (
    BEST,
    METRICS,
    Checkpoint,
    checkpoint_folders,
    find_checkpoints,
)
from mlxtune.core.run.metrics import ValidationRecord
from mlxtune.core.run.progress import Progress
from mlxtune.core.run.run_folder import (
    ABOUT,
    EVALUATION,
    LEDGER,
    REFERENCE,
    RESULT,
    TRAINED_ROWS,
)
from mlxtune.core.run.stored_run import mapping, read_ledgers
from mlxtune.core.run.trained_rows import check_trained_rows


@dataclass(frozen=True)
class RunCheck:
    """A check: its subject, whether it passed, and the result in words."""

    name: str
    ok: bool
    detail: str


@dataclass
class Verification:
    """All checks of a run. `step` is the last step with a checkpoint."""

    run: str
    step: int = 0
    finished: bool = False
    checks: list[RunCheck] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def add(self, name: str, problem: str | None, detail: str) -> None:
        self.checks.append(RunCheck(name, problem is None, detail if problem is None else problem))

    def attempt(self, name: str, check: Callable[[], str]) -> None:
        """Add a check that returns its result in words, or raises OSError or ValueError."""
        try:
            self.add(name, None, check())
        except (OSError, ValueError) as problem:
            self.add(name, str(problem), "")

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def verify_files(run: Path) -> tuple[Verification, list[Checkpoint]]:
    """Check the files of a run; return the intact checkpoints too, the newest first."""
    good, bad = find_checkpoints(run)
    verification = Verification(str(run), step=good[0].step if good else 0)
    for each in sorted(good, key=lambda each: each.step):
        verification.attempt(each.folder.name, partial(_check_checkpoint, each))
    for folder, problem in sorted(bad.items()):
        verification.add(folder.name, problem, "")
    if not good and not bad:
        verification.add("checkpoints", "none found", "")
    progress = None
    try:
        progress = Progress.from_jsonl(read_own(run / METRICS))
    except (OSError, ValueError) as error:
        verification.add(METRICS, str(error), "")
    else:
        verification.attempt(METRICS, partial(_check_metrics, progress, verification.step))
        if progress.best is not None:
            verification.attempt("best step", partial(_check_best, progress.best, good))
    verification.attempt(LEDGER, partial(_check_ledger, run))
    if good and (run / ABOUT).exists():
        newest = max(good, key=lambda each: each.step)
        verification.attempt(ABOUT, partial(_check_options, run, newest))
    _verify_result(verification, run, progress)
    if os.path.lexists(run / TRAINED_ROWS):  # earlier versions wrote none
        verification.attempt(TRAINED_ROWS, partial(check_trained_rows, run))
    options = mapping(good[0].metadata, "config") if good else {}
    if os.path.lexists(run / REFERENCE) or options.get("objective") in ("dpo", "kto"):
        verification.attempt(REFERENCE, partial(check_references, run / REFERENCE))
    if (run / EVALUATION).exists():  # a run without validation has none
        verification.attempt(EVALUATION, partial(_check_evaluation, run))
    return verification, good


def _check_checkpoint(checkpoint: Checkpoint) -> str:
    step = Progress.from_jsonl(checkpoint.metrics).step
    if step != checkpoint.step:
        raise ValueError(f"{METRICS} ends at step {step}, but metadata.json at {checkpoint.step}")
    return f"step {step}, all files intact"


def _check_metrics(progress: Progress, newest: int) -> str:
    epochs = [metrics.epoch for metrics in progress.epochs]
    if epochs != list(range(1, len(epochs) + 1)):
        raise ValueError(f"its epochs are {', '.join(map(str, epochs))}")
    before = 0
    for record in progress:
        epoch = getattr(record, "epoch", before)
        if epoch < before:
            raise ValueError(f"epoch {epoch} comes after epoch {before}")
        before = epoch
    if progress.step < newest:
        raise ValueError(
            f"ends at step {progress.step}, before the newest checkpoint, at step {newest}"
        )
    taken = f"{count(progress.step, 'step')}, {count(len(epochs), 'epoch')}"
    return f"{taken}, none missing or duplicated"


def _check_best(best: ValidationRecord, good: list[Checkpoint]) -> str:
    saved = next((each.step for each in good if each.folder.name == BEST), None)
    if saved is None:
        raise ValueError(f"step {best.step} is the best, but best/ is not a valid checkpoint")
    if saved != best.step:
        raise ValueError(f"the checkpoint is from step {saved}, not {best.step}")
    return f"step {best.step}, validation loss {best.val_loss:.4f}"


def _check_ledger(run: Path) -> str:
    ledgers = read_ledgers(run / LEDGER)
    for ledger in ledgers:
        if not ledger.adds_up():
            raise ValueError(f"{ledger.path} does not add up")
    return f"{count(sum(ledger.rows_read for ledger in ledgers), 'row')}, all accounted for"


def _check_options(run: Path, newest: Checkpoint) -> str:
    said, kept = mapping(read_json(run / ABOUT), "config"), mapping(newest.metadata, "config")
    for name, option in OPTIONS.items():
        # A resumed run may have different paths and be longer.
        fixed = option.affects is Affects.RESULT and not option.path
        if fixed and name in said and name in kept and said[name] != kept[name]:
            raise ValueError(
                f"has {flag(name)} {said[name]!r:.40}, but {newest.folder.name} has "
                f"{kept[name]!r:.40}"
            )
    return f"its options are those of {newest.folder.name}"


def _verify_result(found: Verification, run: Path, progress: Progress | None) -> None:
    try:
        result = read_json(run / RESULT)
    except ValueError as error:
        found.add(RESULT, str(error), "")
        return
    except OSError:
        again = "resume it with mlxtune train --resume"
        found.add(
            "end", None, f"unfinished: {again if checkpoint_folders(run) else 'start it again'}"
        )
        return
    found.finished = True
    steps = result.get("steps")
    problem = None
    if progress is not None and steps != progress.step:
        problem = f"has {steps!r:.20} steps, but {METRICS} has {progress.step}"
    found.add(RESULT, problem, f"{steps} steps")
    found.attempt("adapter", partial(_check_adapter, run, result))


def _check_adapter(run: Path, result: Mapping[str, Any]) -> str:
    adapter = Path(os.path.normpath(run / str(result.get("adapter"))))
    # A pipe or device could be read forever.
    if not adapter.is_file():
        raise ValueError(f"{adapter}: no such file")
    if file_hash(adapter) != result.get("sha256"):
        raise ValueError(f"{adapter} has changed since the run wrote it: its SHA-256 differs")
    return f"{adapter} has not changed since the run wrote it"


def _check_evaluation(run: Path) -> str:
    evaluation = read_json(run / EVALUATION)
    verdict, rows = evaluation.get("verdict"), evaluation.get("rows")
    if verdict not in VERDICTS or not isinstance(rows, int):
        raise ValueError("has no verdict")
    hardly = "hardly " * (evaluation.get("hardly") is True)
    return f"{hardly}{verdict} on {count(rows, 'row')}"
