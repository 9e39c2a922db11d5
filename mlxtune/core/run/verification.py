"""Checks of a run that need only its files."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlxtune.core.files.ours import is_ours
from mlxtune.core.files.reading import read_json, read_own
from mlxtune.core.files.remembered import MARK
from mlxtune.core.formatting import pluralize
from mlxtune.core.objectives.preference_rows import check_references
from mlxtune.core.run import checkpoint_checks, cross_checks
from mlxtune.core.run.checkpoint import (
    BEST,
    MANIFEST,
    METRICS,
    Checkpoint,
    checkpoint_folders,
    find_checkpoints,
    is_named_checkpoint,
)
from mlxtune.core.run.metrics import ValidationRecord
from mlxtune.core.run.progress import Progress
from mlxtune.core.run.run_folder import (
    ABOUT,
    EVALUATION,
    EVALUATION_HASH,
    LEDGER,
    REFERENCE,
    RESULT,
    TRAINED_ROWS,
)
from mlxtune.core.run.stored_run import get_mapping
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
            self.add(name, _in_words(problem, name), "")

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def verify_files(run: Path) -> tuple[Verification, list[Checkpoint]]:
    """Check the files of a run; return the intact checkpoints too, the newest first."""
    good, bad = find_checkpoints(run)
    newest = good[0] if good else None
    verification = Verification(str(run), step=newest.step if newest else 0)
    finished = (run / RESULT).exists()
    for each in sorted(good, key=lambda each: each.step):
        check = partial(checkpoint_checks.check_checkpoint, each, good[0])
        verification.attempt(each.folder.name, check)
    for folder, problem in sorted(bad.items()):
        verification.add(folder.name, problem, "")
    named = {path for path in run.iterdir() if is_named_checkpoint(path)}
    for folder in sorted(named - set(checkpoint_folders(run))):
        verification.add(folder.name, f"is not a checkpoint: it has no {MANIFEST}", "")
    if not good and not bad:
        verification.add("checkpoints", "none found", "")
    verification.attempt(MARK, partial(_check_mark, run))
    progress = None
    try:
        content = read_own(run / METRICS)
        progress = Progress.from_jsonl(content)
    except (OSError, ValueError) as error:
        verification.add(METRICS, _in_words(error, METRICS), "")
    else:
        verification.attempt(METRICS, partial(_check_metrics, content, progress, newest, finished))
        if progress.best is not None:
            verification.attempt("best step", partial(_check_best, progress.best, good))
    ended = newest if finished else None
    verification.attempt(LEDGER, partial(cross_checks.check_ledger, run, ended, progress))
    if newest is not None:
        check = partial(cross_checks.check_about, run, newest, finished=finished)
        verification.attempt(ABOUT, check)
        at_end = finished and checkpoint_checks.is_last(newest, progress)
        check = partial(cross_checks.check_file_hashes, run, newest, ended=at_end)
        verification.attempt("files before the first step", check)
    _verify_result(verification, run, progress, good)
    verification.attempt(TRAINED_ROWS, partial(_check_trained_rows, run, newest))
    options = get_mapping(good[0].metadata, "config") if good else {}
    if os.path.lexists(run / REFERENCE) or options.get("objective") in ("dpo", "kto"):
        verification.attempt(REFERENCE, partial(check_references, run / REFERENCE))
    _verify_evaluation(verification, run, progress, options)
    return verification, good


def _verify_evaluation(
    verification: Verification, run: Path, progress: Progress | None, options: Mapping[str, Any]
) -> None:
    """Check the evaluation, which runs without validation and interrupted runs lack."""
    result: Mapping[str, Any] | None = None
    with suppress(OSError, ValueError):  # another check reports the error
        result = read_json(run / RESULT)
    if os.path.lexists(run / EVALUATION) or EVALUATION_HASH in (result or {}):

        def check() -> str:
            cross_checks.check_evaluation_hash(run, result)
            return cross_checks.check_evaluation(run, progress, options)

        verification.attempt(EVALUATION, check)
    elif result is not None and progress is not None and progress.validations:
        none = "none: the run has no verdict; mlxtune eval gives one"
        verification.add(EVALUATION, None, none)


def _in_words(problem: Exception, name: str) -> str:
    """Return the problem of a check, without the number and the path of an error of the system."""
    if not isinstance(problem, OSError) or problem.strerror is None:
        return str(problem)
    file = Path(os.fsdecode(problem.filename or name)).name
    subject = "" if file == name else f"{file} "
    if isinstance(problem, FileNotFoundError):
        return f"{subject}is missing"
    return f"{subject}cannot be read: {problem.strerror}"


def _check_mark(run: Path) -> str:
    if not is_ours(run / MARK):
        raise ValueError("is missing, so other commands do not take the folder for a run's")
    return "the folder is a run's"


def _check_trained_rows(run: Path, newest: Checkpoint | None) -> str:
    summary = check_trained_rows(run)
    cross_checks.check_file_hash(run / TRAINED_ROWS, newest)
    return summary


def _check_metrics(
    content: bytes, progress: Progress, newest: Checkpoint | None, finished: bool
) -> str:
    epochs = [metrics.epoch for metrics in progress.epochs]
    if epochs != list(range(1, len(epochs) + 1)):
        raise ValueError(f"its epochs are {', '.join(map(str, epochs))}")
    before = 0
    for record in progress:
        epoch = getattr(record, "epoch", before)
        if epoch < before:
            raise ValueError(f"epoch {epoch} comes after epoch {before}")
        before = epoch
    if newest is not None:
        if progress.step < newest.step:
            raise ValueError(
                f"ends at step {progress.step}, before the newest checkpoint, at step {newest.step}"
            )
        checkpoint_checks.check_copy(content, newest, finished=finished)
    cross_checks.check_metrics_agree(progress)
    counts = f"{pluralize(progress.step, 'step')}, {pluralize(len(epochs), 'epoch')}"
    return f"{counts}, none missing or duplicated"


def _check_best(best: ValidationRecord, good: list[Checkpoint]) -> str:
    saved = next((checkpoint.step for checkpoint in good if checkpoint.folder.name == BEST), None)
    if saved is None:
        raise ValueError(f"step {best.step} is the best, but best/ is not a valid checkpoint")
    if saved != best.step:
        raise ValueError(f"the checkpoint is from step {saved}, not {best.step}")
    return f"step {best.step}, validation loss {best.val_loss:.4f}"


def _verify_result(
    verification: Verification, run: Path, progress: Progress | None, good: list[Checkpoint]
) -> None:
    try:
        result = read_json(run / RESULT)
    except ValueError as error:
        verification.add(RESULT, str(error), "")
        return
    except OSError:
        again = "resume it with mlxtune train --resume"
        missing = ""
        if progress is not None and good and checkpoint_checks.has_ended(good[0], progress):
            missing = f"its last step is taken, but there is no {RESULT}: "
            check = partial(checkpoint_checks.check_adapter_without_result, run, progress, good)
            verification.attempt("adapter", check)
        rest = again if checkpoint_folders(run) else "start it again"
        verification.add("end", None, f"unfinished: {missing}{rest}")
        return
    verification.finished = True
    if progress is None:
        verification.add(RESULT, None, f"{result.get('steps')} steps")
    else:
        verification.attempt(RESULT, partial(cross_checks.check_result, result, progress, good))
    verification.attempt("adapter", partial(checkpoint_checks.check_adapter, run, result, good))
