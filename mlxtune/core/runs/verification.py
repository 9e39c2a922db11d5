"""What can be checked of a run's folder by its files alone."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxtune.core.data.ledger import Ledger
from mlxtune.core.machine.files import file_hash, read_json, read_own
from mlxtune.core.training.checkpoint import BEST, METRICS, Checkpoint, find_checkpoints
from mlxtune.core.training.evaluation import VERDICTS
from mlxtune.core.training.progress import Progress
from mlxtune.core.training.run_folder import EVALUATION, LEDGER, read_result


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, what it is, and whether it is as it should be."""

    name: str
    ok: bool
    detail: str


@dataclass
class Verification:
    """All checks of a run. `step` is the last that a checkpoint holds, `finished` its end."""

    run: str
    step: int = 0
    finished: bool = False
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Tell whether all is as it should be."""
        return all(check.ok for check in self.checks)

    def add(self, name: str, problem: str | None, detail: str) -> None:
        """Add a check: a problem, or what is well."""
        self.checks.append(Check(name, problem is None, detail if problem is None else problem))

    def as_dict(self) -> dict[str, Any]:
        """Return all as JSON-ready values."""
        return {"ok": self.ok, **asdict(self)}


def verify_files(run: Path) -> tuple[Verification, list[Checkpoint]]:
    """Check a run's folder by its files; return the good checkpoints too, the newest first."""
    found = Verification(str(run))
    good, bad = find_checkpoints(run)
    found.step = good[0].step if good else 0
    for each in sorted(good, key=lambda each: each.step):
        found.add(each.folder.name, _metadata_problem(each), f"step {each.step}, all files whole")
    for folder, problem in sorted(bad.items()):
        found.add(folder.name, problem, "")
    if not good and not bad:
        found.add("checkpoints", "there is none", "")
    progress = _verify_metrics(found, run, good)
    _verify_best(found, progress, good)
    _verify_ledger(found, run)
    _verify_result(found, run, progress)
    _verify_evaluation(found, run)
    return found, good


def _metadata_problem(found: Checkpoint) -> str | None:
    try:
        progress = Progress.from_jsonl(found.metrics)
    except (OSError, ValueError) as error:
        return f"{METRICS}: {error}"
    if progress.step != found.step:
        return f"{METRICS} ends at step {progress.step}, metadata.json at {found.step}"
    return None


def _verify_metrics(found: Verification, run: Path, good: list[Checkpoint]) -> Progress | None:
    try:
        progress = Progress.from_jsonl(read_own(run / METRICS))
    except (OSError, ValueError) as error:
        found.add(METRICS, str(error), "")
        return None
    problem = _gap(progress)
    newest = good[0].step if good else 0
    if problem is None and progress.step < newest:
        problem = f"ends at step {progress.step}, before the newest checkpoint, of step {newest}"
    steps = f"{progress.step} steps, {len(progress.epochs)} epochs, none missing or twice"
    found.add(METRICS, problem, steps)
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


def _verify_best(found: Verification, progress: Progress | None, good: list[Checkpoint]) -> None:
    best = progress.best if progress else None
    if best is None:
        return
    there = next((each for each in good if each.folder.name == BEST), None)
    problem = None
    if there is None:
        problem = f"there is none, though epoch {best.epoch} is the best"
    elif there.metadata.get("epoch") != best.epoch:
        problem = f"is of epoch {there.metadata.get('epoch')}, the best is epoch {best.epoch}"
    found.add("best epoch", problem, f"epoch {best.epoch}, validation loss {best.val_loss:.4f}")


def _verify_ledger(found: Verification, run: Path) -> None:
    try:
        ledgers = list(_ledgers(run / LEDGER))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        found.add(LEDGER, f"cannot be read: {error}", "")
        return
    wrong = next((ledger.path for ledger in ledgers if not ledger.adds_up()), None)
    rows = sum(ledger.rows_read for ledger in ledgers)
    found.add(LEDGER, wrong and f"{wrong} does not add up", f"{rows:,} rows, all accounted for")


def _ledgers(path: Path) -> Iterator[Ledger]:
    for entry in json.loads(read_own(path).decode("utf-8")):
        counters = {name: Counter(entry[name]) for name in ("rows_skipped", "notes")}
        yield Ledger(**{**entry, **counters})


def _verify_result(found: Verification, run: Path, progress: Progress | None) -> None:
    try:
        result = read_result(run)
    except ValueError as error:
        found.add("result.json", str(error), "")
        return
    if result is None:
        found.add("end", None, "not reached: go on with mlxtune train --resume")
        return
    found.finished = True
    steps = result.get("steps")
    problem = None
    if progress is not None and steps != progress.step:
        problem = f"says {steps!r:.20} steps, {METRICS} has {progress.step}"
    found.add("result.json", problem, f"{steps} steps")
    adapter = Path(os.path.normpath(run / str(result.get("adapter"))))
    if adapter.exists() and not adapter.is_file():
        found.add("adapter", f"{adapter}: is no file", "")
        return
    try:
        same = file_hash(adapter) == result.get("sha256")
    except OSError as missing:
        found.add("adapter", f"{adapter}: {missing.strerror}", "")
        return
    changed = f"{adapter} is not what the run wrote: its SHA-256 differs"
    found.add("adapter", None if same else changed, f"{adapter} is what the run wrote")


def _verify_evaluation(found: Verification, run: Path) -> None:
    """Check what was written of the adapter's evaluation; a run without validation has none."""
    try:
        evaluation = read_json(run / EVALUATION)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        found.add(EVALUATION, str(error), "")
        return
    verdict, rows = evaluation.get("verdict"), evaluation.get("rows")
    known = verdict in VERDICTS and isinstance(rows, int)
    found.add(EVALUATION, None if known else "holds no verdict", f"{verdict} on {rows} rows")
