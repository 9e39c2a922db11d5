"""Checks of a run that need only its files."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxtune.core.data.ledger import Ledger
from mlxtune.core.machine.files import file_hash, read_json, read_own
from mlxtune.core.text import count
from mlxtune.core.training.checkpoint import BEST, METRICS, Checkpoint, find_checkpoints
from mlxtune.core.training.evaluation import VERDICTS
from mlxtune.core.training.progress import Progress
from mlxtune.core.training.run_folder import EVALUATION, LEDGER, RESULT, read_result


@dataclass(frozen=True)
class Check:
    """A check: its subject, whether it passed, and the result in words."""

    name: str
    ok: bool
    detail: str


@dataclass
class Verification:
    """All checks of a run. `step` is the last with a checkpoint."""

    run: str
    step: int = 0
    finished: bool = False
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return all(check.ok for check in self.checks)

    def add(self, name: str, problem: str | None, detail: str) -> None:
        """Add a check, which failed if there is a problem."""
        self.checks.append(Check(name, problem is None, detail if problem is None else problem))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `mlxtune verify`."""
        return {"ok": self.ok, **asdict(self)}


def verify_files(run: Path) -> tuple[Verification, list[Checkpoint]]:
    """Check the files of a run; return the intact checkpoints too, the newest first."""
    verification = Verification(str(run))
    good, bad = find_checkpoints(run)
    verification.step = good[0].step if good else 0
    for each in sorted(good, key=lambda each: each.step):
        detail = f"step {each.step}, all files intact"
        verification.add(each.folder.name, _metadata_problem(each), detail)
    for folder, problem in sorted(bad.items()):
        verification.add(folder.name, problem, "")
    if not good and not bad:
        verification.add("checkpoints", "none found", "")
    progress = _verify_metrics(verification, run)
    _verify_best(verification, progress, good)
    _verify_ledger(verification, run)
    _verify_result(verification, run, progress)
    _verify_evaluation(verification, run)
    return verification, good


def _metadata_problem(checkpoint: Checkpoint) -> str | None:
    try:
        progress = Progress.from_jsonl(checkpoint.metrics)
    except (OSError, ValueError) as error:
        return f"{METRICS}: {error}"
    if progress.step != checkpoint.step:
        return f"{METRICS} ends at step {progress.step}, metadata.json at {checkpoint.step}"
    return None


def _verify_metrics(verification: Verification, run: Path) -> Progress | None:
    try:
        progress = Progress.from_jsonl(read_own(run / METRICS))
    except (OSError, ValueError) as error:
        verification.add(METRICS, str(error), "")
        return None
    problem = _gap(progress)
    if problem is None and progress.step < verification.step:
        newest = f"the newest checkpoint, at step {verification.step}"
        problem = f"ends at step {progress.step}, before {newest}"
    epochs = count(len(progress.epochs), "epoch")
    detail = f"{count(progress.step, 'step')}, {epochs}, none missing or duplicated"
    verification.add(METRICS, problem, detail)
    return progress


def _gap(progress: Progress) -> str | None:
    epochs = [metrics.epoch for metrics in progress.epochs]
    if epochs != list(range(1, len(epochs) + 1)):
        return f"its epochs are {', '.join(map(str, epochs))}"
    before = 0
    for record in progress.records:
        epoch = getattr(record, "epoch", before)
        if epoch < before:
            return f"epoch {epoch} comes after epoch {before}"
        before = epoch
    return None


def _verify_best(
    verification: Verification, progress: Progress | None, good: list[Checkpoint]
) -> None:
    best = progress.best if progress else None
    if best is None:
        return
    saved = next((each for each in good if each.folder.name == BEST), None)
    problem = None
    if saved is None:
        problem = f"it has no checkpoint, though epoch {best.epoch} is the best"
    elif saved.metadata.get("epoch") != best.epoch:
        problem = f"the checkpoint is of epoch {saved.metadata.get('epoch')}, not {best.epoch}"
    detail = f"epoch {best.epoch}, validation loss {best.val_loss:.4f}"
    verification.add("best epoch", problem, detail)


def _verify_ledger(verification: Verification, run: Path) -> None:
    try:
        ledgers = [_ledger(entry) for entry in json.loads(read_own(run / LEDGER).decode("utf-8"))]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        verification.add(LEDGER, f"cannot be read: {error}", "")
        return
    wrong = next((ledger.path for ledger in ledgers if not ledger.adds_up()), None)
    rows = sum(ledger.rows_read for ledger in ledgers)
    problem = None if wrong is None else f"{wrong} does not add up"
    verification.add(LEDGER, problem, f"{count(rows, 'row')}, all accounted for")


def _ledger(entry: dict[str, Any]) -> Ledger:
    counters = {name: Counter(entry[name]) for name in ("rows_skipped", "notes")}
    return Ledger(**{**entry, **counters})


def _verify_result(verification: Verification, run: Path, progress: Progress | None) -> None:
    try:
        result = read_result(run)
    except ValueError as error:
        verification.add(RESULT, str(error), "")
        return
    if result is None:
        verification.add("end", None, "unfinished: resume it with mlxtune train --resume")
        return
    verification.finished = True
    steps = result.get("steps")
    problem = None
    if progress is not None and steps != progress.step:
        problem = f"has {steps!r:.20} steps, {METRICS} has {progress.step}"
    verification.add(RESULT, problem, f"{steps} steps")
    adapter = Path(os.path.normpath(run / str(result.get("adapter"))))
    if adapter.exists() and not adapter.is_file():
        verification.add("adapter", f"{adapter}: is not a file", "")
        return
    try:
        same = file_hash(adapter) == result.get("sha256")
    except OSError as missing:
        verification.add("adapter", f"{adapter}: {missing.strerror}", "")
        return
    changed = f"{adapter} has changed since the run wrote it: its SHA-256 differs"
    verification.add(
        "adapter", None if same else changed, f"{adapter} has not changed since the run wrote it"
    )


def _verify_evaluation(verification: Verification, run: Path) -> None:
    """Check evaluation.json; a run without validation has none."""
    try:
        evaluation = read_json(run / EVALUATION)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        verification.add(EVALUATION, str(error), "")
        return
    verdict, rows = evaluation.get("verdict"), evaluation.get("rows")
    known = verdict in VERDICTS and isinstance(rows, int)
    verification.add(EVALUATION, None if known else "has no verdict", f"{verdict} on {rows} rows")
