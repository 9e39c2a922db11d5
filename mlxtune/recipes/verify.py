"""Checking a run after the fact: its files, its adapters against the model, and by training again.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxtune.config import StepConfig, TrainConfig, user_cache
from mlxtune.errors import MlxTuneError, ModelError, OutputError, TrainingInterrupted, printable

if TYPE_CHECKING:
    from mlxtune.core.runs.verification import Verification
    from mlxtune.core.training.checkpoint import Checkpoint


def verify(run: str | Path, *, replay: bool = False, model_path: str = "") -> Verification:
    """Check the folder of a run: every file, its records, and its adapters against the base model.

    With `replay`, it is trained again from its first checkpoint, or from the start where it has one
    only, to its newest, and both are compared. `model_path` says where the base model is now.

    Raises OutputError when there is no such folder. What is wrong with the run is not raised.
    """
    from mlxtune.core.runs.verification import verify_files
    from mlxtune.setup.resuming import run_folder_of

    folder = run_folder_of(str(run))
    found, good = verify_files(folder)
    if not good:
        return found
    try:
        config = _config_of(folder, good[0], model_path)
        _verify_model(found, config, good)
        if replay:
            _replay(found, config, good)
    except MlxTuneError as problem:
        found.add("model", str(problem), "")
    return found


def show(run: str, *, replay: bool, model_path: str, as_json: bool) -> bool:
    """Print what `verify` finds: a line a check, or JSON. Tell whether all is well."""
    found = verify(run, replay=replay, model_path=model_path)
    if as_json:
        json.dump(found.as_dict(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return found.ok
    width = max(len(check.name) for check in found.checks) + 2
    for check in found.checks:
        print(printable(f"{'ok' if check.ok else 'BAD':<4}{check.name:<{width}}{check.detail}"))
    bad = sum(not check.ok for check in found.checks)
    checks = f"{len(found.checks)} checks"
    print(printable(f"{found.run}: {checks}, {f'{bad} failed' if bad else 'all passed'}"))
    return found.ok


def _config_of(folder: Path, newest: Checkpoint, model_path: str) -> TrainConfig:
    from mlxtune.setup.resuming import options_of

    return options_of(folder, newest, {"model_path": model_path} if model_path else {})


def _verify_model(found: Verification, config: TrainConfig, good: list[Checkpoint]) -> None:
    """Compare every adapter with the base model, of which no weight is loaded."""
    from mlxtune.backend.adapters import checkpoints
    from mlxtune.backend.lora.apply import apply_lora
    from mlxtune.backend.model import loading, model_folder
    from mlxtune.core.machine.hashing import ModelHash
    from mlxtune.core.training.checkpoint import ADAPTER

    folder = model_folder.find_folder(config.model_path)
    expected, actual = good[0].metadata.get("base_hash"), ModelHash(folder, user_cache()).result()
    changed = f"{folder}: its weights are not those that the run began with"
    found.add("base model", None if actual == expected else changed, str(folder))
    step = config.part(StepConfig)
    base = loading.open_base(folder, step.dtype, **step.loading())
    summary = apply_lora(base.model, config.lora())
    for each in reversed(good):
        name = f"{each.folder.name}/{ADAPTER}"
        try:
            count = checkpoints.check_adapter(each.folder / ADAPTER, base.model, summary)
        except ModelError as problem:
            found.add(name, str(problem), "")
        else:
            found.add(name, None, f"{count} tensors, names and shapes as the model's")


def _replay(found: Verification, config: TrainConfig, good: list[Checkpoint]) -> None:
    """Train again from the first checkpoint to the newest, in a folder of its own."""
    from mlxtune.core.machine.files import file_hash
    from mlxtune.core.training.checkpoint import ADAPTER, METRICS
    from mlxtune.core.training.progress import Progress, same_except_measurements
    from mlxtune.core.training.run_folder import ResumePoint
    from mlxtune.recipes.train import train
    from mlxtune.setup.resuming import check_initial

    newest, first = good[0], good[-1]
    resumed = None
    if first.step < newest.step:
        resumed = ResumePoint(first, Progress.from_jsonl(first.metrics), [], {})
    elif config.init_adapter is not None:
        check_initial(config.init_adapter, newest.metadata)
    with tempfile.TemporaryDirectory(prefix="mlxtune-verify-") as scratch:
        own = replace(
            config,
            output=str(Path(scratch) / ADAPTER),
            checkpoint_dir=str(Path(scratch) / "checkpoints"),
            quiet=True,
            # It is no run of its own to follow or to measure.
            track=(),
            profile_interval=0,
            samples=0,
        )
        try:
            train(own, resume=resumed, stop_after=newest.step)
        except TrainingInterrupted as stopped:
            assert stopped.checkpoint is not None
            again = stopped.checkpoint
        else:
            raise OutputError(f"{found.run}: training again did not come to step {newest.step}")
        same = file_hash(again / ADAPTER) == file_hash(newest.folder / ADAPTER)
        records = Progress.from_jsonl((again / METRICS).read_bytes()).records
    before = Progress.from_jsonl(newest.metrics).records[: len(records)]
    start = f"trained again from step {first.step if resumed else 0} to {newest.step}"
    problem = None
    if not same or not same_except_measurements(records, before):
        problem = f"{start}: the {'metrics' if same else 'adapter'} differ{'' if same else 's'}"
    found.add("replay", problem, f"{start}: the same bytes")
