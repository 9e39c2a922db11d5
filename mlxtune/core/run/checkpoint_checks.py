"""Compares checkpoints with the newest one, and adapters with the checkpoints' hashed copies.

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
from mlxtune.config.fields import flag
from mlxtune.config.limits import ADAPTER_CONFIG_LIMITS, MANIFEST_LIMITS, parse_json
from mlxtune.config.lora_config import scale_of
from mlxtune.config.option import Effect
from mlxtune.config.train_config import adapter_path
from mlxtune.core.files.ours import contents
from mlxtune.core.files.reading import file_hash, open_regular, read_json
from mlxtune.core.files.tensor_files import read_header
from mlxtune.core.run.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    BEST,
    FACTS,
    INITIAL_HASH,
    MANIFEST,
    METRICS,
    Checkpoint,
)
from mlxtune.core.run.metrics import InstructEpochMetrics, SkippedStep, StepRecord
from mlxtune.core.run.progress import Progress, Record
from mlxtune.core.run.stored_run import get_mapping, get_str

# Facts that all checkpoints of a run share.
SHARED_FACTS = (
    *FACTS,
    *(INITIAL_HASH, "model_type", "seed", "lora_rank", "lora_alpha", "targets"),
)
# The metadata entry, and the keys of mlx-lm's config, that decide how an adapter is loaded.
_OWN_CONFIG, _LOADED_KEYS = "adapter_config", ("rank", "scale", "keys")
# The entries whose values are paths.
_PATHS = ("path", "model")
# An evaluation adds up losses in batches that the free memory may decide.
_LOSS_TOLERANCE = 1e-5
_PIECE = 2**20


def check_checkpoint(checkpoint: Checkpoint, newest: Checkpoint) -> str:
    """Compare a checkpoint's metadata, metrics and adapter with each other and the newest's."""
    listed = read_json(checkpoint.folder / MANIFEST, MANIFEST_LIMITS)["files"]
    if others := contents(checkpoint.folder).keys() - {*listed, MANIFEST}:
        raise ValueError(f"{min(others)} is not in its {MANIFEST}")
    progress, metadata = Progress.from_jsonl(checkpoint.metrics), checkpoint.metadata
    if progress.step != checkpoint.step:
        raise ValueError(
            f"{METRICS} ends at step {progress.step}, but metadata.json at {checkpoint.step}"
        )
    best = progress.best
    check_equal(
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
        both = {key: (metadata.get(key), newest.metadata.get(key)) for key in SHARED_FACTS}
        check_equal("metadata.json", name, both)
        check_options(metadata, newest, all_options=False)
        check_copy(checkpoint.metrics, newest)
        own, other = (each.folder / ADAPTER for each in (checkpoint, newest))
        if checkpoint.step == newest.step and not _have_equal_tensors(own, other):
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
        if not is_close(metadata.get(name), expected, 1e-9):
            raise ValueError(
                f"metadata.json has {name} {metadata.get(name)!r:.40}, but {METRICS} gives "
                f"{expected:.6g}"
            )


def _check_scale(checkpoint: Checkpoint) -> None:
    """Compare the scale in an adapter's configs with the run's options."""
    config = get_mapping(checkpoint.metadata, "config")
    expected = None
    if not config.get("target_rank") and {"alpha", "rank"} <= config.keys():
        rslora = config.get("rslora") is True
        expected = scale_of(config["alpha"], config["rank"], rslora=rslora)
    for name, loaded in _configs(checkpoint.folder / ADAPTER):
        scale = get_mapping(loaded, "lora_parameters").get("scale")
        if expected is not None and not is_close(scale, expected, 1e-6):
            raise ValueError(f"{name} has scale {scale!r:.40}, but the options give {expected:g}")


def check_options(values: Mapping[str, Any], newest: Checkpoint, *, all_options: bool) -> None:
    written, kept = get_mapping(values, "config"), get_mapping(newest.metadata, "config")
    for name, option in OPTIONS.items():
        fixed = option.affects is Effect.RESULT and not option.path
        both = name in written and name in kept
        if both and (fixed or all_options) and written[name] != kept[name]:
            raise ValueError(
                f"has {flag(name)} {written[name]!r:.40}, but {newest.folder.name} has "
                f"{kept[name]!r:.40}"
            )


def check_copy(own: bytes, newest: Checkpoint, *, finished: bool = False) -> None:
    """Compare metrics with the copy in the newest checkpoint, as far as both go."""
    copy, name = newest.metrics, newest.folder.name
    if own.startswith(copy):
        return
    records, copied = list(Progress.from_jsonl(own)), list(Progress.from_jsonl(copy))
    for index, (record, kept) in enumerate(zip(records, copied, strict=False)):
        if record == kept:
            continue
        own_rest, rest = records[index:], copied[index:]
        # Resuming drops the records that ended an unfinished epoch, and goes on with a step.
        if _continues(own_rest, rest) or _continues(rest, own_rest):
            return
        raise ValueError(f"has {named(record)}, but {name} has {named(kept)}")
    if finished and len(records) < len(copied):
        raise ValueError(f"lacks {named(copied[len(records)])}, which {name} has")


def _continues(records: Sequence[Record], dropped: Sequence[Record]) -> bool:
    of_steps = (StepRecord, SkippedStep)
    return isinstance(records[0], of_steps) and not any(
        isinstance(each, of_steps) for each in dropped
    )


def named(record: Record) -> str:
    """Name a record by its kind and place, with its loss."""
    value = getattr(record, "loss", getattr(record, "val_loss", ""))
    title = f"{type(record).__name__} {getattr(record, 'step', getattr(record, 'epoch', 0))}"
    return f"{title} with {value:.6g}" if isinstance(value, float) else title


def has_ended(newest: Checkpoint, progress: Progress) -> bool:
    """Return whether a run has taken its last step, also by early stopping, and ended its epoch."""
    patience = get_mapping(newest.metadata, "config").get("patience")
    over = progress.step == newest.metadata.get("total_steps") or (
        isinstance(patience, int) and progress.validations_since_best >= patience
    )
    return over and isinstance(progress[len(progress) - 1], InstructEpochMetrics)


def is_last(newest: Checkpoint, progress: Progress | None) -> bool:
    """Return whether a checkpoint is the one that a finished run writes at its end."""
    at_end = progress is not None and newest.step == progress.step
    return at_end and not newest.folder.name.startswith("step-")


# Adapters


def check_adapter(run: Path, result: Mapping[str, Any], good: Sequence[Checkpoint]) -> str:
    """Compare the written adapter with the result, and with the checkpoint that it was chosen from.

    This checkpoint is `best/` or, without validation, one of the last step.
    """
    if not isinstance(named := result.get("adapter"), str):
        raise ValueError("result.json names no adapter")
    adapter = Path(os.path.normpath(run / named))
    # A pipe or device could be read forever.
    if not adapter.is_file():
        raise ValueError(f"{adapter}: no such file")
    if file_hash(adapter) != result.get("sha256"):
        raise ValueError(f"{adapter} has changed since the run wrote it: its SHA-256 differs")
    place = _place_of_adapter(good[0]) if good else None
    if place not in (None, os.path.normpath(named)):
        raise ValueError(f"is {named!r:.100}, but the run's options put it at {place}")
    _check_source(adapter, result.get("best_step") or result.get("steps"), good)
    return f"{adapter} has not changed since the run wrote it"


def check_adapter_without_result(run: Path, progress: Progress, good: Sequence[Checkpoint]) -> str:
    """Compare the adapter with its checkpoint, after a run that ended but wrote no result.

    The adapter is the last file before the result, so an interrupted run may also lack it.
    """
    place = _place_of_adapter(good[0])
    adapter = Path(os.path.normpath(run / (place or f"../{ADAPTER}")))
    if not os.path.lexists(adapter):
        return "none written yet"
    if not adapter.is_file():
        raise ValueError(f"{adapter} is not a file")
    best = progress.best
    source = _check_source(adapter, best.step if best else progress.step, good)
    if source is None:
        raise ValueError(f"{adapter} has no checkpoint and no result to compare it with")
    return f"{adapter} is the adapter of {source.folder.name}"


def _check_source(adapter: Path, step: Any, good: Sequence[Checkpoint]) -> Checkpoint | None:
    """Compare an adapter with a checkpoint of its step, if any; return the checkpoint."""
    candidates = [checkpoint for checkpoint in good if checkpoint.step == step]
    candidates.sort(key=lambda each: each.folder.name != BEST)
    for source in candidates[:1]:
        name = f"{source.folder.name}/{ADAPTER}"
        if not _have_equal_tensors(adapter, source.folder / ADAPTER):
            raise ValueError(f"{adapter} differs from {name}, from which the run wrote it")
        _check_configs(adapter, source, good[0])
    return next(iter(candidates), None)


def _check_configs(adapter: Path, source: Checkpoint, newest: Checkpoint) -> None:
    """Compare the written adapter's configs with the configs in the checkpoint."""
    configs, expected = dict(_configs(adapter)), dict(_configs(source.folder / ADAPTER))
    if ADAPTER_CONFIG in expected and ADAPTER_CONFIG not in configs:
        raise ValueError(f"{adapter.with_name(ADAPTER_CONFIG)} is missing")
    # The file beside the adapter may be another adapter's with the same settings.
    others = any(path != adapter for path in adapter.parent.glob("*.safetensors"))
    for kind, config in configs.items():
        kept = expected.get(kind, expected.get(ADAPTER_CONFIG, {}))
        loaded, wanted = (get_mapping(each, "lora_parameters") for each in (config, kept))
        both = {each: (loaded.get(each), wanted.get(each)) for each in _LOADED_KEYS}
        check_equal(f"{adapter.with_name(kind)}", source.folder.name, both if wanted else {})
        if kind not in expected or (kind == ADAPTER_CONFIG and others):
            continue
        own, other = (_comparable(each) for each in (config, kept))
        # A run that resumes may write its adapter in a later version, which records more.
        own["mlxtune"] = {name: own["mlxtune"].get(name) for name in other["mlxtune"]}
        # A run may resume with its model in another folder.
        moved = Path(get_str(get_mapping(newest.metadata, "config"), "model_path")).name
        if Path(str(own.get("model"))).name == moved:
            other["model"] = own["model"]
        if (entry := first_difference(own, other)) is not None:
            raise ValueError(
                f"{adapter.with_name(kind)} has another {entry} than {source.folder.name}"
            )


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "mlxtune": dict(get_mapping(config, "mlxtune"))}


def _place_of_adapter(newest: Checkpoint) -> str | None:
    """Return the adapter's path, relative to the run, by the options of the newest checkpoint."""
    config = get_mapping(newest.metadata, "config")
    if not isinstance(config.get("output"), str):
        return None
    there = Path(get_str(newest.metadata, "working_directory"))
    output = there / adapter_path(config["output"])
    folder = config.get("checkpoint_dir")
    run = output.parent / "checkpoints" if folder is None else there / as_path(str(folder))
    return os.path.relpath(output, run)


def _configs(adapter: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the config in an adapter's metadata, and the config beside it if there is one."""
    own_config = _metadata(adapter, adapter.stat().st_mtime_ns).get(_OWN_CONFIG, "{}")
    own = parse_json(own_config.encode(), ADAPTER_CONFIG_LIMITS, adapter.name)
    if isinstance(own, Mapping) and own:
        yield adapter.name, own
    if (beside := adapter.with_name(ADAPTER_CONFIG)).is_file():
        yield ADAPTER_CONFIG, read_json(beside, ADAPTER_CONFIG_LIMITS)


@lru_cache(16)  # several checks read an adapter's config
def _metadata(adapter: Path, written: int) -> Mapping[str, str]:
    """Return the metadata in the header of an adapter that was written at a time."""
    return read_header(adapter).metadata


def _have_equal_tensors(own: Path, other: Path) -> bool:
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


# Values


def check_equal(own: str, other: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ValueError for the first name whose two values differ."""
    for name, (here, there) in values.items():
        if here != there:
            raise ValueError(f"{own} has {name} {here!r:.60}, but {other} has {there!r:.60}")


def is_close(value: Any, expected: float, tolerance: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=tolerance)


def first_difference(own: Any, other: Any, name: str = "content") -> str | None:
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
        return None if math.isclose(own, other, rel_tol=_LOSS_TOLERANCE, abs_tol=1e-9) else name
    elif name in _PATHS and isinstance(own, str) and isinstance(other, str):
        return None if Path(own).name == Path(other).name else name
    else:
        return None if own == other else name
    return next((reason for pair in pairs if (reason := first_difference(*pair)) is not None), None)
