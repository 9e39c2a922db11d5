"""Compares facts that the files of a run hold twice; the checkpoints' hashed copies decide.

Each function returns its result in words, or raises OSError, or ValueError for a contradiction.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlxtune.config import OPTIONS, as_path
from mlxtune.config.data_config import weighted
from mlxtune.config.fields import flag
from mlxtune.config.limits import ADAPTER_CONFIG as CONFIG_LIMITS
from mlxtune.config.limits import parse_json
from mlxtune.config.lora_config import scale_of
from mlxtune.config.option import Affects
from mlxtune.config.train_config import adapter_path
from mlxtune.core.data.corpus import rows_used
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.data.problems import shown
from mlxtune.core.evaluation.matching import count_exact
from mlxtune.core.evaluation.outcome import CANNOT_TELL, Evaluation, Loss, perplexity
from mlxtune.core.evaluation.verdict import is_negligible, preference_verdict, verdict_of
from mlxtune.core.files.reading import file_hash, open_regular, read_json
from mlxtune.core.files.tensor_files import read_header
from mlxtune.core.formatting import pluralise
from mlxtune.core.run.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    BEST,
    METRICS,
    RECORDS,
    Checkpoint,
)
from mlxtune.core.run.metrics import InstructEpochMetrics, SkippedStep, StepRecord, TrainingMetrics
from mlxtune.core.run.progress import Progress, Record
from mlxtune.core.run.run_folder import ABOUT, EVALUATION, EVALUATION_HASH, LEDGER, RESULT
from mlxtune.core.run.stored_run import get_mapping, get_str, read_evaluation, read_ledgers

# Facts that all checkpoints of a run share.
_SHARED = (
    *("data_hash", "validation_hash", "base_hash", "init_adapter_hash", "model_type", "dtype"),
    *("seed", "lora_rank", "lora_alpha", "targets"),
)
# The metadata entry, and the keys of mlx-lm's config, that decide how an adapter is loaded.
_OWN_CONFIG, _LOADED = "adapter_config", ("rank", "scale", "keys")
# The fraction by which a loss may differ between training and the evaluation afterwards, and a
# difference in nats below which it is rounding.
_ROUNDING, _SMALLEST = 0.05, 1e-3
# The entries whose values are paths.
_PATHS = ("path", "model")
# An evaluation adds up losses in batches that the free memory may decide.
_CLOSE = 1e-5
_PIECE = 2**20
_DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


# Checkpoints


def check_checkpoint(checkpoint: Checkpoint, newest: Checkpoint) -> str:
    """Compare a checkpoint's metadata, metrics and adapter with each other and the newest's."""
    progress, metadata = Progress.from_jsonl(checkpoint.metrics), checkpoint.metadata
    if progress.step != checkpoint.step:
        raise ValueError(
            f"{METRICS} ends at step {progress.step}, but metadata.json at {checkpoint.step}"
        )
    best = progress.best
    _equal(
        "metadata.json",
        METRICS,
        {
            "best_step": (metadata.get("best_step"), best.step if best else None),
            "best_val_loss": (metadata.get("best_val_loss"), best.val_loss if best else None),
        },
    )
    _check_epoch(metadata, progress)
    _check_scale(checkpoint)
    if checkpoint.folder != newest.folder:
        name = newest.folder.name
        both = {key: (metadata.get(key), newest.metadata.get(key)) for key in _SHARED}
        _equal("metadata.json", name, both)
        _check_options(metadata, newest, all_options=False)
        check_copy(checkpoint.metrics, newest)
        own, other = (each.folder / ADAPTER for each in (checkpoint, newest))
        if checkpoint.step == newest.step and not _same_adapter(own, other):
            raise ValueError(f"{ADAPTER} is not the one of {name}, of the same step")
    return f"step {progress.step}, all files intact"


def _check_epoch(metadata: Mapping[str, Any], progress: Progress) -> None:
    """Derive a checkpoint's losses from its metrics."""
    epoch, losses = metadata.get("epoch"), {each.val_loss for each in progress.validations[-1:]}
    facts = {}
    if isinstance(epoch, int) and any(step.epoch == epoch for step in progress.steps):
        facts["train_loss"] = progress.epoch_metrics(epoch, None, 0.0, 0).train_loss
    if metadata.get("val_loss") is not None:
        facts["val_loss"] = next(iter(losses), math.nan)
    for name, expected in facts.items():
        if not _is_close(metadata.get(name), expected, 1e-9):
            raise ValueError(
                f"metadata.json has {name} {metadata.get(name)!r:.40}, but {METRICS} gives "
                f"{expected:.6g}"
            )


def _equal(own: str, other: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ValueError for the first name whose two values differ."""
    for name, (here, there) in values.items():
        if here != there:
            raise ValueError(f"{own} has {name} {here!r:.60}, but {other} has {there!r:.60}")


def _check_scale(checkpoint: Checkpoint) -> None:
    """Compare the scale in an adapter's configs with the run's options."""
    config = get_mapping(checkpoint.metadata, "config")
    expected = None
    if not config.get("target_rank") and {"alpha", "rank"} <= config.keys():
        rslora = config.get("rslora") is True
        expected = scale_of(config["alpha"], config["rank"], rslora=rslora)
    for name, loaded in _configs(checkpoint.folder / ADAPTER):
        scale = get_mapping(loaded, "lora_parameters").get("scale")
        if expected is not None and not _is_close(scale, expected, 1e-6):
            raise ValueError(f"{name} has scale {scale!r:.40}, but the options give {expected:g}")


def _configs(adapter: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the config in an adapter's metadata, and the config beside it if there is one."""
    own_config = _metadata(adapter, adapter.stat().st_mtime_ns).get(_OWN_CONFIG, "{}")
    own = parse_json(own_config.encode(), CONFIG_LIMITS, adapter.name)
    if isinstance(own, Mapping) and own:
        yield adapter.name, own
    if (beside := adapter.with_name(ADAPTER_CONFIG)).is_file():
        yield ADAPTER_CONFIG, read_json(beside, CONFIG_LIMITS)


@lru_cache(16)  # several checks read an adapter's config
def _metadata(adapter: Path, written: int) -> Mapping[str, str]:
    """Return the metadata in the header of an adapter that was written at a time."""
    return read_header(adapter).metadata


def _is_close(value: Any, expected: float, tolerance: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=tolerance)


def _same_adapter(own: Path, other: Path) -> bool:
    """Return whether two adapters have equal tensors; the rest of their headers may differ."""
    if file_hash(own) == file_hash(other):
        return True
    return read_header(own).tensors == read_header(other).tensors and _data(own) == _data(other)


def _data(path: Path) -> str:
    """Return the hash of a safetensors file's tensors."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


# Metrics


def check_copy(own: bytes, newest: Checkpoint, *, finished: bool = False) -> None:
    """Compare metrics with the copy in the newest checkpoint, as far as both go."""
    copy, name = newest.metrics, newest.folder.name
    if own.startswith(copy):
        return
    records, copied = list(Progress.from_jsonl(own)), list(Progress.from_jsonl(copy))
    for place, (record, kept) in enumerate(zip(records, copied, strict=False)):
        if record == kept:
            continue
        own_rest, rest = records[place:], copied[place:]
        # Resuming drops the records that ended an unfinished epoch, and goes on with a step.
        if _continues(own_rest, rest) or _continues(rest, own_rest):
            return
        raise ValueError(f"has {named(record)}, but {name} has {named(kept)}")
    if finished and len(records) < len(copied):
        raise ValueError(f"lacks {named(copied[len(records)])}, which {name} has")


def _continues(records: Sequence[Record], dropped: Sequence[Record]) -> bool:
    taken = (StepRecord, SkippedStep)
    return isinstance(records[0], taken) and not any(isinstance(each, taken) for each in dropped)


def named(record: Record) -> str:
    """Name a record by its kind and place, with its loss."""
    value = getattr(record, "loss", getattr(record, "val_loss", ""))
    place = f"{type(record).__name__} {getattr(record, 'step', getattr(record, 'epoch', 0))}"
    return f"{place} with {value:.6g}" if isinstance(value, float) else place


def check_records(progress: Progress) -> None:
    """Compute again what metrics state twice: perplexities, and the mean loss of each epoch."""
    steps: dict[int, list[StepRecord]] = {}
    for record in progress.steps:
        steps.setdefault(record.epoch, []).append(record)
        if not record.metrics and not _is_close(record.perplexity, perplexity(record.loss), 1e-9):
            raise ValueError(
                f"step {record.step} has loss {record.loss:.6g}, but perplexity "
                f"{record.perplexity:.6g}"
            )
    for each in progress.validations:
        if not _is_close(each.val_perplexity, perplexity(each.val_loss), 1e-9):
            raise ValueError(
                f"the validation after step {each.step} has loss {each.val_loss:.6g}, but "
                f"perplexity {each.val_perplexity:.6g}"
            )
    for epoch in progress.epochs:
        own = steps.get(epoch.epoch, [])
        mean = TrainingMetrics(len(own), own).average_loss()
        if mean is not None and not _is_close(epoch.train_loss, mean, 1e-9):
            raise ValueError(
                f"epoch {epoch.epoch} has training loss {epoch.train_loss:.6g}, but its steps have "
                f"{mean:.6g}"
            )


# The files beside the checkpoints


def check_about(run: Path, newest: Checkpoint, *, finished: bool) -> str:
    """Compare run.json with the newest checkpoint.

    A run that resumes may have other paths and more steps, until it writes a checkpoint.
    """
    about, name = read_json(run / ABOUT), newest.folder.name
    _check_options(about, newest, all_options=finished)
    hashes = {each: (about.get(each), newest.metadata.get(each)) for each in _SHARED[:2]}
    _equal(ABOUT, name, {each: both for each, both in hashes.items() if each in about})
    model, plan = get_mapping(about, "model"), get_mapping(about, "plan")
    facts = {"model_type": model.get("type"), "dtype": model.get("dtype")}
    if finished:
        facts["total_steps"] = plan.get("steps")
    kept = {each: (value, newest.metadata.get(each)) for each, value in facts.items()}
    _equal(ABOUT, name, {each: both for each, both in kept.items() if None not in both})
    return f"its options are those of {name}"


def _check_options(values: Mapping[str, Any], newest: Checkpoint, *, all_options: bool) -> None:
    said, kept = get_mapping(values, "config"), get_mapping(newest.metadata, "config")
    for name, option in OPTIONS.items():
        fixed = option.affects is Affects.RESULT and not option.path
        both = name in said and name in kept
        if both and (fixed or all_options) and said[name] != kept[name]:
            raise ValueError(
                f"has {flag(name)} {said[name]!r:.40}, but {newest.folder.name} has "
                f"{kept[name]!r:.40}"
            )


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
    if progress is not None:
        _check_trained(ledgers, progress)
    if (run / ABOUT).exists():
        _check_plan(ledgers, read_json(run / ABOUT))
    return f"{pluralise(rows, 'row')}, all accounted for"


def _check_files(ledgers: Sequence[Ledger], config: Mapping[str, Any]) -> None:
    """Compare the ledger's files with the options; a folder or a data set has several files."""
    paths = {ledger.path for ledger in ledgers}
    for value in config.get("data") or ():
        path = as_path(weighted(str(value))[0])
        if path.suffix in _DATA_FILES and shown(path) not in paths:
            raise ValueError(f"lacks {path}, on which the run was trained")


def _check_trained(ledgers: Sequence[Ledger], progress: Progress) -> None:
    expected = 0
    for ledger in ledgers:
        whole, part = rows_used(ledger.rows_train, ledger.weight)
        expected += whole * ledger.rows_train + part
    rows: dict[int, int] = {}
    for record in progress:
        if isinstance(record, StepRecord | SkippedStep):
            own = record.rows if isinstance(record, StepRecord) else len(record.rows)
            rows[record.epoch] = rows.get(record.epoch, 0) + own
    for epoch, used in rows.items():
        if used > expected or (used < expected and epoch + 1 in rows):
            raise ValueError(
                f"has {pluralise(expected, 'row')} to train on, but epoch {epoch} in {METRICS} has "
                f"{used:,}"
            )
    held_out = sum(ledger.rows_validation for ledger in ledgers)
    if bool(held_out) != bool(progress.validations):
        raise ValueError(
            f"has {pluralise(held_out, 'validation row')}, but {METRICS} has "
            f"{pluralise(len(progress.validations), 'validation')}"
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
    _equal(LEDGER, ABOUT, {name: both for name, both in facts.items() if both[1] is not None})


def check_recorded(run: Path, newest: Checkpoint, *, ended: bool) -> str:
    """Compare files from before the first step with their hashes in the newest checkpoint.

    A run that resumes writes some of them again, so their content is compared only if the newest
    checkpoint is the last that a finished run wrote: `ended`.
    """
    names = get_mapping(newest.metadata, RECORDS)
    for name in names:
        if not os.path.lexists(run / name):
            raise ValueError(f"{name} is missing, but {newest.folder.name} has its hash")
        if ended:
            check_record(run / name, newest)
    return ", ".join(names)


def is_complete(newest: Checkpoint, progress: Progress) -> bool:
    """Return whether a run has taken all its steps, and ended their last epoch."""
    total = newest.metadata.get("total_steps")
    return progress.step == total and isinstance(progress[len(progress) - 1], InstructEpochMetrics)


def is_last(newest: Checkpoint, progress: Progress | None) -> bool:
    """Return whether a checkpoint is the one that a finished run writes at its end."""
    at_end = progress is not None and newest.step == progress.step
    return at_end and not newest.folder.name.startswith("step-")


def check_evaluation_hash(run: Path, result: Mapping[str, Any]) -> None:
    """Compare evaluation.json with its hash in result.json, which earlier versions lack."""
    expected = result.get(EVALUATION_HASH)
    if expected is not None and file_hash(run / EVALUATION) != expected:
        raise ValueError(f"has changed since the run wrote it: its SHA-256 is not in {RESULT}")


def check_record(path: Path, newest: Checkpoint | None) -> None:
    """Compare the hash of a file from before the first step with the newest checkpoint's copy."""
    if newest is None:
        return
    expected = get_mapping(newest.metadata, RECORDS).get(path.name)
    if expected is not None and file_hash(path) != expected:
        raise ValueError(f"its hashes are not those in {newest.folder.name}")


def check_result(result: Mapping[str, Any], progress: Progress, good: Sequence[Checkpoint]) -> str:
    """Compare the result with the metrics."""
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
    both = {name: (result[name], value) for name, value in facts.items() if name in result}
    _equal("it", METRICS, both)
    return f"{steps} steps"


def check_adapter(run: Path, result: Mapping[str, Any], good: Sequence[Checkpoint]) -> str:
    """Compare the written adapter with the result, and with the checkpoint that it was chosen from.

    This checkpoint is `best/` or, without validation, one of the last step.
    """
    adapter = Path(os.path.normpath(run / str(result.get("adapter"))))
    # A pipe or device could be read forever.
    if not adapter.is_file():
        raise ValueError(f"{adapter}: no such file")
    if file_hash(adapter) != result.get("sha256"):
        raise ValueError(f"{adapter} has changed since the run wrote it: its SHA-256 differs")
    if good:
        _check_place(str(result.get("adapter")), good[0])
    step = result.get("best_step") or result.get("steps")
    chosen = [checkpoint for checkpoint in good if checkpoint.step == step]
    chosen.sort(key=lambda each: each.folder.name != BEST)
    for source in chosen[:1]:
        name = f"{source.folder.name}/{ADAPTER}"
        if not _same_adapter(adapter, source.folder / ADAPTER):
            raise ValueError(f"{adapter} differs from {name}, from which the run wrote it")
        _check_configs(adapter, source, good[0])
    return f"{adapter} has not changed since the run wrote it"


def _check_configs(adapter: Path, source: Checkpoint, newest: Checkpoint) -> None:
    """Compare the configs of the written adapter with those of the checkpoint's."""
    configs, expected = dict(_configs(adapter)), dict(_configs(source.folder / ADAPTER))
    if ADAPTER_CONFIG in expected and ADAPTER_CONFIG not in configs:
        raise ValueError(f"{adapter.with_name(ADAPTER_CONFIG)} is missing")
    # The file beside the adapter may be another adapter's with the same settings.
    others = any(path != adapter for path in adapter.parent.glob("*.safetensors"))
    for kind, config in configs.items():
        kept = expected.get(kind, expected.get(ADAPTER_CONFIG, {}))
        loaded, wanted = (get_mapping(each, "lora_parameters") for each in (config, kept))
        both = {each: (loaded.get(each), wanted.get(each)) for each in _LOADED}
        _equal(f"{adapter.with_name(kind)}", source.folder.name, both if wanted else {})
        if kind not in expected or (kind == ADAPTER_CONFIG and others):
            continue
        own, other = (_comparable(each) for each in (config, kept))
        # Versions differ in what they record.
        notes = own["mlxtune"].keys() & other["mlxtune"].keys()
        own["mlxtune"], other["mlxtune"] = (
            {name: each["mlxtune"][name] for name in notes} for each in (own, other)
        )
        # A run may resume with its model in another folder.
        moved = Path(get_str(get_mapping(newest.metadata, "config"), "model_path")).name
        if Path(str(own.get("model"))).name == moved:
            other["model"] = own["model"]
        if (entry := difference(own, other)) is not None:
            raise ValueError(
                f"{adapter.with_name(kind)} has another {entry} than {source.folder.name}"
            )


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "mlxtune": dict(get_mapping(config, "mlxtune"))}


def _check_place(named: str, newest: Checkpoint) -> None:
    """Compare the adapter's place with the options of the newest checkpoint."""
    config = get_mapping(newest.metadata, "config")
    if not isinstance(config.get("output"), str):
        return
    there = Path(get_str(newest.metadata, "working_directory"))
    output = there / adapter_path(config["output"])
    folder = config.get("checkpoint_dir")
    run = output.parent / "checkpoints" if folder is None else there / as_path(str(folder))
    expected = os.path.relpath(output, run)
    if os.path.normpath(named) != expected:
        raise ValueError(f"is {named!r:.100}, but the run's options put it at {expected}")


def check_evaluation(run: Path, progress: Progress | None, options: Mapping[str, Any]) -> str:
    """Compute the verdict again, and compare the evaluation with the ledger and the metrics."""
    found, ledgers = read_evaluation(run / EVALUATION), read_ledgers(run / LEDGER)
    if found is None or found.verdict is None or found.adapted is None or found.difference is None:
        raise ValueError("has no verdict")
    before = found.base if found.start is None else found.start
    held_out = sum(ledger.rows_validation for ledger in ledgers)
    # Answers without a reward do not count.
    if ledgers and not found.rewards and found.rows + found.left_out != held_out:
        raise ValueError(
            f"has {pluralise(found.rows + found.left_out, 'row')}, but {LEDGER} has "
            f"{pluralise(held_out, 'validation row')}"
        )
    _check_difference(found, before, found.adapted)
    if progress is not None and found.candidates > 1:  # earlier versions did not count them
        after = sum(validation.step > 0 for validation in progress.validations)
        _equal("it", METRICS, {"candidates": (found.candidates, after)})
    _check_verdict(found)
    if progress is not None and not found.left_out and options.get("objective") == "sft":
        best = progress.best
        for name, loss, kept in (
            ("before", before, progress.initial_val_loss),
            ("after", found.adapted, best.val_loss if best else None),
        ):
            if kept is not None and abs(loss.loss - kept) > max(_ROUNDING * kept, _SMALLEST):
                raise ValueError(
                    f"has loss {loss.loss:.4f} {name} training, but {METRICS} has {kept:.4f}"
                )
    hardly = "hardly " * found.hardly
    return f"{hardly}{found.verdict} on {pluralise(found.rows, 'row')}"


def _check_difference(found: Evaluation, before: Loss, adapted: Loss) -> None:
    difference = found.difference
    assert difference is not None
    values = {
        "perplexity": (adapted.perplexity, perplexity(adapted.loss)),
        "base perplexity": (found.base.perplexity, perplexity(found.base.loss)),
        "first perplexity": (before.perplexity, perplexity(before.loss)),
        "difference": (difference.loss, adapted.loss - before.loss),
        "share": (difference.share, difference.loss / before.loss if before.loss else 0.0),
    }
    for name, (own, again) in values.items():
        if not math.isclose(own, again, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(f"has {name} {own:.6g}, but its losses give {again:.6g}")
    if difference.low > difference.high:
        raise ValueError(f"has an interval from {difference.low:.6g} to {difference.high:.6g}")
    if (generated := found.generated) is not None and generated.samples:
        samples = generated.samples
        facts = {
            "answers": (generated.rows, len(samples)),
            "exact matches": (generated.exact_match, count_exact(samples)),
        }
        _equal("it", "its samples", facts)


def _check_verdict(found: Evaluation) -> None:
    """Derive the verdict again from the interval."""
    assert found.difference is not None
    if found.only_trained:
        verdict = CANNOT_TELL
    elif found.preference is not None:
        # Its size is not among the recorded values, so `hardly` stays as it is.
        verdict = preference_verdict(found.preference, only_trained=False)
    else:
        verdict = verdict_of(found.difference, found.rows)
        negligible = is_negligible(verdict, found.difference.share) and not found.rewards
        _equal("it", "its interval", {"hardly": (found.hardly, negligible)})
    _equal("it", "its interval", {"verdict": (found.verdict, verdict)})


def difference(own: Any, other: Any, name: str = "content") -> str | None:
    """Return the name of the first entry in which two JSON values differ, if any.

    Of paths, only the last parts are compared, and numbers may differ by rounding.
    """
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        names = [*own, *(each for each in other if each not in own)]
        pairs = [(own.get(each), other.get(each), each) for each in names]
    elif isinstance(own, list | tuple) and isinstance(other, list | tuple):
        if len(own) != len(other):
            return f"number of entries in {name}" if name != "content" else "number of entries"
        pairs = [(*both, name) for both in zip(own, other, strict=True)]
    elif isinstance(own, float) and isinstance(other, float | int):
        return None if math.isclose(own, other, rel_tol=_CLOSE, abs_tol=1e-9) else name
    elif name in _PATHS and isinstance(own, str) and isinstance(other, str):
        return None if Path(own).name == Path(other).name else name
    else:
        return None if own == other else name
    return next((found for pair in pairs if (found := difference(*pair)) is not None), None)
