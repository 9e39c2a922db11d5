"""Compares the files of a run with those of its replay, in a scratch folder.

Paths, times, memory, and versions may differ; everything else must be equal.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlxtune.config.limits import ADAPTER_CONFIG_LIMITS
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.run.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    FILE_HASHES,
    METADATA,
    OPTIMIZER,
    PARAMETERS,
    WRITTEN_SAMPLES,
    Checkpoint,
)
from mlxtune.core.run.checkpoint_checks import first_difference, named
from mlxtune.core.run.metrics import ADDED_METRICS, SkippedStep, StepRecord
from mlxtune.core.run.progress import MEASURED_FIELDS, Record, have_equal_results
from mlxtune.core.run.run_folder import ABOUT, EVALUATION, EVALUATION_HASH, LEDGER, RESULT
from mlxtune.core.run.stored_run import get_mapping, read_evaluation, read_ledgers

# Parts of the records that the machine, the place or later options decide.
_VARIABLE_METADATA = (
    *(*MEASURED_FIELDS, "total_time_ms", "versions", "working_directory", "workers", "extensions"),
    *("config", FILE_HASHES, WRITTEN_SAMPLES, "quantized_compute"),
)
_VARIABLE_RESULT = ("total_time_ms", "peak_memory", "adapter", "sha256", EVALUATION_HASH)
_COMPARED_ABOUT = ("model", "lora", "template", "lengths", "data_hash", "validation_hash")
_COMPARED_PLAN = ("steps", "steps_per_epoch", "rows_train", "rows_validation")


def check_metrics(own: Sequence[Record], again: Sequence[Record]) -> str | None:
    """Return the first difference between the records of a run and of its replay, if any."""
    for record, other in zip(own, again, strict=False):
        if not have_equal_results([record], [_as_recorded(other, record)]):
            return f"{named(record)}, but training again gives {named(other)}"
    if len(own) < len(again):
        return f"no {named(again[len(own)])}"
    if len(own) > len(again):
        return f"{named(own[len(again)])}, which training again does not give"
    return None


def _as_recorded(again: Record, own: Record) -> Record:
    """Return a replayed record without the metrics that the run's version did not record."""
    if not (isinstance(again, StepRecord) and isinstance(own, StepRecord)):
        return again
    added = set(ADDED_METRICS) - own.metrics.keys()
    metrics = {name: value for name, value in again.metrics.items() if name not in added}
    return replace(again, metrics=metrics)


def check_checkpoint_again(own: Checkpoint, again: Path) -> str | None:
    """Return the first file of a checkpoint that differs from the replay's, if any."""
    for name in (ADAPTER, OPTIMIZER, PARAMETERS):
        here, there = own.folder / name, again / name
        if here.exists() != there.exists() or (
            here.exists() and file_hash(here) != file_hash(there)
        ):
            return name
    if (own.folder / ADAPTER_CONFIG).exists():
        here, there = own.folder / ADAPTER_CONFIG, again / ADAPTER_CONFIG
        # The model may now be in another folder.
        own_config, config = (
            {**read_json(each, ADAPTER_CONFIG_LIMITS), "model": None} for each in (here, there)
        )
        if (entry := first_difference(own_config, config)) is not None:
            return f"{ADAPTER_CONFIG} ({entry})"
    kept, computed = own.metadata, read_json(again / METADATA)
    names = sorted((kept.keys() & computed.keys()) - set(_VARIABLE_METADATA))
    parts = [{each: part[each] for each in names} for part in (kept, computed)]
    entry = first_difference(parts[0], parts[1])
    return None if entry is None else f"{METADATA} ({entry})"


def check_rates(records: Sequence[Record], rate: Callable[[int], float]) -> str | None:
    """Compare the learning rates of steps with the schedule; return the first difference.

    `rate` returns the rate of a step, under the options that the run had then.
    """
    for record in records:
        if isinstance(record, StepRecord | SkippedStep):
            expected = rate(record.step)
            if not math.isclose(record.learning_rate, expected, rel_tol=1e-9):
                return (
                    f"step {record.step} has learning rate {record.learning_rate:.6g}, but the "
                    f"options give {expected:.6g}"
                )
    return None


def checks_of_files(run: Path, again: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each file beside the checkpoints, and a check of it.

    `again` is the folder of a finished replay of the finished run.
    """
    yield ABOUT, lambda: _check_about(run, again)
    yield LEDGER, lambda: _check_ledgers(run, again)
    yield RESULT, lambda: _check_result(run, again)
    if (run / EVALUATION).exists():
        yield EVALUATION, lambda: _check_evaluation(run, again)


def _check_about(run: Path, again: Path) -> str:
    own, other = (read_json(each / ABOUT) for each in (run, again))
    for each in (own, other):  # the model may now be in another folder
        each["model"] = {**get_mapping(each, "model"), "path": None}
    for part, names in ((("plan",), _COMPARED_PLAN), ((), _COMPARED_ABOUT)):
        here, there = ((each.get("plan", {}) if part else each) for each in (own, other))
        _check_equal(*({name: each.get(name) for name in names} for each in (here, there)))
    return "its model, data and plan are those of the replay"


def _check_ledgers(run: Path, again: Path) -> str:
    own, other = (
        [ledger.as_dict() for ledger in read_ledgers(each / LEDGER)] for each in (run, again)
    )
    _check_equal(own, other)
    return "reading the data again gives the same"


def _check_result(run: Path, again: Path) -> str:
    own, other = (read_json(each / RESULT) for each in (run, again))
    names = (own.keys() & other.keys()) - set(_VARIABLE_RESULT)
    _check_equal(*({name: each[name] for name in sorted(names)} for each in (own, other)))
    return "training again gives the same"


def _check_evaluation(run: Path, again: Path) -> str:
    if not (again / EVALUATION).exists():
        return "not judged again, as a warning says"
    own, other = (read_evaluation(each / EVALUATION) for each in (run, again))
    if own is None or other is None:
        raise ValueError("has no verdict")
    here, there = asdict(own), asdict(other)
    if own.generated is None:  # a run may end before the samples
        del here["generated"], there["generated"]
    _check_equal(here, there)
    return f"judged again: {own.verdict}"


def _check_equal(own: Any, other: Any) -> None:
    if (name := first_difference(own, other)) is not None:
        raise ValueError(f"has another {name} than its replay")


def up_to(records: list[Record], step: int) -> list[Record]:
    """Return the records up to the first step after `step`."""
    later = (
        index
        for index, record in enumerate(records)
        if isinstance(record, StepRecord | SkippedStep) and record.step > step
    )
    return records[: next(later, len(records))]
