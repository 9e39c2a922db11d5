"""Compares the files beside the checkpoints with each other and with the newest checkpoint.

Each function returns its result in words, or raises OSError, or ValueError for a contradiction.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxtune.config import as_path
from mlxtune.config.data_config import weighted
from mlxtune.core.data.corpus import rows_used
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.data.problems import path_text
from mlxtune.core.evaluation.matching import count_exact
from mlxtune.core.evaluation.outcome import Evaluation, Loss, perplexity
from mlxtune.core.evaluation.verdict import is_negligible, verdict_of
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.formatting import pluralize
from mlxtune.core.run.checkpoint import FILE_HASHES, METRICS, Checkpoint
from mlxtune.core.run.checkpoint_checks import SHARED_FACTS, check_equal, check_options, is_close
from mlxtune.core.run.metrics import SkippedStep, StepRecord, TrainingMetrics
from mlxtune.core.run.progress import Progress
from mlxtune.core.run.run_folder import (
    ABOUT,
    ABOUT_KEYS,
    BEFORE_STEPS,
    EVALUATION,
    EVALUATION_HASH,
    LEDGER,
    RESULT,
    RESULT_KEYS,
    RESUMED,
)
from mlxtune.core.run.stored_run import get_int, get_mapping, read_evaluation, read_ledgers

# The fraction by which a loss may differ between training and the evaluation afterwards, and a
# difference in nats below which it is rounding.
_ROUNDING, _MIN_DIFFERENCE = 0.05, 1e-3
_DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def check_metrics_agree(progress: Progress) -> None:
    """Compute again what metrics state twice: perplexities, and the mean loss of each epoch."""
    steps: dict[int, list[StepRecord]] = {}
    for record in progress.steps:
        steps.setdefault(record.epoch, []).append(record)
        if not record.is_of_rows and not is_close(record.perplexity, perplexity(record.loss), 1e-9):
            raise ValueError(
                f"step {record.step} has loss {record.loss:.6g}, but perplexity "
                f"{record.perplexity:.6g}"
            )
    for each in progress.validations:
        if not is_close(each.val_perplexity, perplexity(each.val_loss), 1e-9):
            raise ValueError(
                f"the validation after step {each.step} has loss {each.val_loss:.6g}, but "
                f"perplexity {each.val_perplexity:.6g}"
            )
    for epoch in progress.epochs:
        own = steps.get(epoch.epoch, [])
        mean = TrainingMetrics(len(own), own).average_loss()
        if mean is not None and not is_close(epoch.train_loss, mean, 1e-9):
            raise ValueError(
                f"epoch {epoch.epoch} has training loss {epoch.train_loss:.6g}, but its steps have "
                f"{mean:.6g}"
            )


def check_about(run: Path, newest: Checkpoint, *, finished: bool) -> str:
    """Compare run.json with the newest checkpoint.

    A run that resumes may have other paths and more steps, until it writes a checkpoint.
    """
    about, name = read_json(run / ABOUT), newest.folder.name
    _check_keys(about, ABOUT_KEYS)
    options = get_mapping(about, "config")
    _check_keys(options, get_mapping(newest.metadata, "config"), "config.")
    check_options(about, newest, all_options=finished)
    model, plan = get_mapping(about, "model"), get_mapping(about, "plan")
    facts = {each: about.get(each) for each in SHARED_FACTS[:2]}
    facts |= {"model_type": model.get("type"), "dtype": model.get("dtype")}
    if finished:
        facts["total_steps"] = plan.get("steps")
    kept = {each: (value, newest.metadata.get(each)) for each, value in facts.items()}
    check_equal(ABOUT, name, kept)
    return f"its options are those of {name}"


def check_ledger(run: Path, ended: Checkpoint | None, progress: Progress | None) -> str:
    """Check that the ledger adds up, and compare it with the steps and with run.json.

    `ended` is the last checkpoint of a finished run.
    """
    ledgers = read_ledgers(run / LEDGER)
    for ledger in ledgers:
        if not ledger.adds_up():
            raise ValueError(f"{ledger.path} does not add up")
    rows = sum(ledger.rows_read for ledger in ledgers)
    if not rows:
        raise ValueError("has no rows, but the run trained on some")
    if ended is not None:
        _check_files(ledgers, get_mapping(ended.metadata, "config"))
    about: Mapping[str, Any] | None = None
    with suppress(OSError, ValueError):  # another check reports the error
        about = read_json(run / ABOUT)
    if progress is not None:
        updates = get_int(get_mapping(about or {}, "config"), "updates") or 1
        _check_trained(ledgers, progress, updates)
    if about is not None:
        _check_plan(ledgers, about)
    return f"{pluralize(rows, 'row')}, all accounted for"


def _check_files(ledgers: Sequence[Ledger], config: Mapping[str, Any]) -> None:
    """Compare the ledger's files with the options; a folder or a data set has several files."""
    paths = {ledger.path for ledger in ledgers}
    for value in config.get("data") or ():
        path = as_path(weighted(str(value))[0])
        if path.suffix in _DATA_FILES and path_text(path) not in paths:
            raise ValueError(f"lacks {path}, on which the run was trained")


def _check_trained(ledgers: Sequence[Ledger], progress: Progress, updates: int) -> None:
    """Compare the ledger with the rows of each epoch's steps, of which `updates` share rows."""
    expected = 0
    for ledger in ledgers:
        whole, part = rows_used(ledger.rows_train, ledger.weight)
        expected += whole * ledger.rows_train + part
    rows: dict[int, int] = {}
    for record in progress:
        if isinstance(record, StepRecord | SkippedStep) and (record.step - 1) % updates == 0:
            own = record.rows if isinstance(record, StepRecord) else len(record.rows)
            rows[record.epoch] = rows.get(record.epoch, 0) + own
    for epoch, used in rows.items():
        if used > expected or (used < expected and epoch + 1 in rows):
            raise ValueError(
                f"has {pluralize(expected, 'row')} to train on, but epoch {epoch} in {METRICS} has "
                f"{used:,}"
            )
    held_out = sum(ledger.rows_validation for ledger in ledgers)
    if bool(held_out) != bool(progress.validations):
        raise ValueError(
            f"has {pluralize(held_out, 'validation row')}, but {METRICS} has "
            f"{pluralize(len(progress.validations), 'validation')}"
        )


def _check_plan(ledgers: Sequence[Ledger], about: Mapping[str, Any]) -> None:
    plan, lengths = get_mapping(about, "plan"), get_mapping(about, "lengths")
    supervised = sum(ledger.tokens_supervised for ledger in ledgers)
    facts = {
        "rows_train": (sum(ledger.rows_train for ledger in ledgers), plan.get("rows_train")),
        "rows_validation": (
            sum(ledger.rows_validation for ledger in ledgers),
            plan.get("rows_validation"),
        ),
        "examples": (sum(ledger.examples for ledger in ledgers), lengths.get("examples")),
        "supervised tokens": (supervised, get_mapping(lengths, "supervised").get("total")),
        "tokens": (
            supervised + sum(ledger.tokens_context for ledger in ledgers),
            get_mapping(lengths, "tokens").get("total"),
        ),
    }
    check_equal(LEDGER, ABOUT, facts)


def check_file_hashes(run: Path, newest: Checkpoint, *, ended: bool) -> str:
    """Compare files from before the first step with their hashes in the newest checkpoint.

    A run that resumes writes them again, so their content is not compared after a run resumed from
    the newest checkpoint, unless this checkpoint is the last that a finished run wrote: `ended`.
    """
    hashes, about = get_mapping(newest.metadata, FILE_HASHES), {}
    with suppress(OSError, ValueError):  # another check reports the error
        about = read_json(run / ABOUT)
    for name in sorted({*hashes, *BEFORE_STEPS}):
        if name not in hashes:
            raise ValueError(f"{newest.folder.name} lacks the hash of {name}")
        if not os.path.lexists(run / name):
            raise ValueError(f"{name} is missing, but {newest.folder.name} has its hash")
        if ended or about.get(RESUMED) != newest.step:
            check_file_hash(run / name, newest)
    return ", ".join(hashes)


def _check_keys(values: Mapping[str, Any], names: Iterable[str], prefix: str = "") -> None:
    """Raise ValueError for the first key that is missing: an absent record is never a pass."""
    for name in names:
        if name not in values:
            raise ValueError(f"lacks {prefix}{name}")


def check_evaluation_hash(run: Path, result: Mapping[str, Any] | None) -> None:
    """Compare evaluation.json with its hash in result.json, which a run writes first."""
    if result is None:
        raise ValueError(f"is there, but {RESULT}, which a run writes before it, is not")
    actual = file_hash(run / EVALUATION)
    if EVALUATION_HASH not in result:
        raise ValueError(f"cannot be confirmed: {RESULT} lacks {EVALUATION_HASH}")
    if actual != result[EVALUATION_HASH]:
        raise ValueError(f"has changed since the run wrote it: its SHA-256 is not in {RESULT}")


def check_file_hash(path: Path, newest: Checkpoint | None) -> None:
    """Compare the hash of a file from before the first step with the newest checkpoint's copy."""
    if newest is None:
        return
    expected = get_mapping(newest.metadata, FILE_HASHES).get(path.name)
    if file_hash(path) != expected:
        raise ValueError(f"{path.name}: its hashes are not those in {newest.folder.name}")


def check_result(result: Mapping[str, Any], progress: Progress, good: Sequence[Checkpoint]) -> str:
    """Compare the result with the metrics."""
    _check_keys(result, RESULT_KEYS)
    steps = result.get("steps")
    if steps != progress.step:
        raise ValueError(f"has {steps!r:.20} steps, but {METRICS} has {progress.step}")
    best, last = progress.best, progress.epochs[-1] if progress.epochs else None
    facts = {
        "epochs": last.epoch if last else None,
        "train_loss": last.train_loss if last else None,
        "initial_val_loss": progress.initial_val_loss,
        "best_epoch": progress.best_epoch,
        "best_step": best.step if best else None,
        "best_val_loss": best.val_loss if best else None,
    }
    if good and (total := good[0].metadata.get("total_steps")) is not None:
        facts["stopped_early"] = progress.step < total
    check_equal("it", METRICS, {name: (result[name], value) for name, value in facts.items()})
    return f"{steps} steps"


def check_evaluation(run: Path, progress: Progress | None, options: Mapping[str, Any]) -> str:
    """Compute the verdict again, and compare the evaluation with the ledger and the metrics."""
    evaluation, ledgers = read_evaluation(run / EVALUATION), read_ledgers(run / LEDGER)
    if (
        evaluation is None
        or evaluation.verdict is None
        or evaluation.adapted is None
        or evaluation.difference is None
    ):
        raise ValueError("has no verdict")
    before = evaluation.baseline
    held_out = sum(ledger.rows_validation for ledger in ledgers)
    # Answers without a reward do not count.
    rows = evaluation.rows + evaluation.left_out + evaluation.copies
    if ledgers and not evaluation.rewards and rows != held_out:
        raise ValueError(
            f"has {pluralize(rows, 'row')}, but {LEDGER} has "
            f"{pluralize(held_out, 'validation row')}"
        )
    _check_difference(evaluation, before, evaluation.adapted)
    if progress is not None and evaluation.candidates > 1:  # earlier versions did not count them
        after = sum(validation.step > 0 for validation in progress.validations)
        check_equal("it", METRICS, {"candidates": (evaluation.candidates, after)})
    _check_verdict(evaluation)
    # Validations are over all held-out rows.
    all_count = not (evaluation.left_out or evaluation.copies)
    if progress is not None and all_count and options.get("objective") == "sft":
        best = progress.best
        for name, loss, kept in (
            ("before", before, progress.initial_val_loss),
            ("after", evaluation.adapted, best.val_loss if best else None),
        ):
            if kept is not None and abs(loss.loss - kept) > max(_ROUNDING * kept, _MIN_DIFFERENCE):
                raise ValueError(
                    f"has loss {loss.loss:.4f} {name} training, but {METRICS} has {kept:.4f}"
                )
    adverb = "hardly " * evaluation.hardly
    return f"{adverb}{evaluation.verdict} on {pluralize(evaluation.rows, 'row')}"


def _check_difference(evaluation: Evaluation, before: Loss, adapted: Loss) -> None:
    difference = evaluation.difference
    assert difference is not None
    values = {
        "perplexity": (adapted.perplexity, perplexity(adapted.loss)),
        "base perplexity": (evaluation.base.perplexity, perplexity(evaluation.base.loss)),
        "first perplexity": (before.perplexity, perplexity(before.loss)),
        "difference": (difference.loss, adapted.loss - before.loss),
        "share": (difference.share, difference.loss / before.loss if before.loss else 0.0),
    }
    for name, (own, again) in values.items():
        if not math.isclose(own, again, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(f"has {name} {own:.6g}, but its losses give {again:.6g}")
    if difference.low > difference.high:
        raise ValueError(f"has an interval from {difference.low:.6g} to {difference.high:.6g}")
    if (generated := evaluation.generated) is not None and generated.samples:
        samples = generated.samples
        facts = {
            "answers": (generated.rows, len(samples)),
            "exact matches": (generated.exact_match, count_exact(samples)),
        }
        check_equal("it", "its samples", facts)


def _check_verdict(evaluation: Evaluation) -> None:
    """Derive the verdict again from the interval."""
    assert evaluation.difference is not None
    verdict = verdict_of(evaluation)
    # The relative size of a preference is not recorded, so its `hardly` cannot be derived.
    if evaluation.preference is None:
        negligible = is_negligible(verdict, evaluation.difference.share) and not evaluation.rewards
        check_equal("it", "its interval", {"hardly": (evaluation.hardly, negligible)})
    check_equal("it", "its interval", {"verdict": (evaluation.verdict, verdict)})
