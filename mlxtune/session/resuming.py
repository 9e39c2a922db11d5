"""Resumes a run: finds its folder and options, and checks that model and data are the same."""

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.adapters.initialize import find_initial
from mlxtune.backend.models.model_folder import is_local
from mlxtune.backend.workers.environment import is_one_of_several
from mlxtune.backend.workers.launch import from_worker_0
from mlxtune.config import OPTIONS, TrainConfig, as_path
from mlxtune.config.fields import check_names, flag, flag_value, read_option
from mlxtune.config.objective_config import parse_reward
from mlxtune.config.option import Effect, Option
from mlxtune.config.train_config import adapter_path, checkpoint_path
from mlxtune.core.files.reading import read_json
from mlxtune.core.files.remembered import is_own
from mlxtune.core.files.writing import is_same_place
from mlxtune.core.formatting import pluralize
from mlxtune.core.run.checkpoint import FACTS, INITIAL_HASH, Checkpoint
from mlxtune.core.run.run_folder import (
    ABOUT,
    LEDGER,
    ROW_FILES,
    STARTED_IN,
    ResumePoint,
    find_resume_point,
)
from mlxtune.core.run.stored_run import get_mapping, get_str, read_ledgers, run_folder_at
from mlxtune.core.run.trained_rows import read_trained_rows
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import ConfigError, DataError, MlxTuneError, ModelError, OutputError, shorten
from mlxtune.hub.dataset_name import data_value
from mlxtune.session.arguments import ResolvedOptions
from mlxtune.views.console import RunConsole

# Options that another user's run must not set: they choose downloads, trackers and code to run.
_UNTRUSTED_OPTIONS = ("model_path", "data", "val_data", "track", "reward")
# The error if a fact of a resumed run differs from its checkpoint's.
_FACT_PROBLEMS: dict[str, tuple[type[MlxTuneError], str]] = {
    "data_hash": (
        DataError,
        "--data gives different examples than the run was trained on{rows}: "
        "bring back the run's files, or train on from its adapter: --init-adapter {checkpoint}",
    ),
    "validation_hash": (
        DataError,
        "--val-data gives different examples than the run was validated with: "
        "bring back the run's file, or train on from its adapter: --init-adapter {checkpoint}",
    ),
    "reward_hash": (
        DataError,
        "--reward: the rewards differ from those at the start of the run: bring back their files "
        "and weights, or train on from its adapter: --init-adapter {checkpoint}",
    ),
    "base_hash": (
        ModelError,
        "--model-path: its weights differ from those at the start of the run: "
        "bring back the folder, or start a new run",
    ),
    "dtype": (
        ModelError,
        "--dtype: this machine computes in {now}, but the run computed in {before}: "
        "start a new run, and set its dtype with --dtype",
    ),
    "quantized_compute": (
        ModelError,
        "--quantized-compute: auto is {now} on this machine, but was {before} in the run: "
        "start a new run",
    ),
}


def find_run(folder: str, changes: Mapping[str, Any]) -> ResolvedOptions[TrainConfig]:
    """Return the options with which the run in a folder resumes: its own, with `changes`.

    If `folder` is empty, looks where the given options would put the checkpoints.

    Raises ConfigError or OutputError.
    """
    check_names(TrainConfig, changes)
    find = partial(_find_point, folder, changes)
    run, point = from_worker_0(find) if is_one_of_several() else find()
    config = run_config(run, point.checkpoint, changes)
    if "output" not in changes:
        _check_output(run, config)
    return ResolvedOptions.recorded(config, point.checkpoint, point)


def _find_point(folder: str, changes: Mapping[str, Any]) -> tuple[Path, ResumePoint]:
    if folder:
        run = run_folder_at(as_path(folder))
    else:
        output = read_option(TrainConfig, "output", changes.get("output", TrainConfig.output))
        other = read_option(TrainConfig, "checkpoint_dir", changes.get("checkpoint_dir"))
        run = checkpoint_path(output, other)
    point = find_resume_point(run)
    if point is None:
        raise OutputError(
            f"{run} holds no checkpoint to resume from: name the folder of a run after --resume, "
            "or start the run again if it was stopped before its first checkpoint"
        )
    check_asked_again(run, point.checkpoint, changes)
    return run, point


def check_asked_again(
    run: Path,
    checkpoint: Checkpoint,
    changes: Mapping[str, Any],
    names: Sequence[str] = _UNTRUSTED_OPTIONS,
) -> None:
    """Raise ConfigError if another user's run chooses downloads, trackers or code to run.

    Such options are used only if the caller gives them again.
    """
    stored = get_mapping(checkpoint.metadata, "config")
    arguments = []
    for name in names:
        value = stored.get(name)
        if not value or name in changes:
            continue
        values = value if isinstance(value, list) else [value]
        if name == "reward":
            # All of them, because new rewards replace the run's rewards.
            values = values if any(parse_reward(str(each)).is_code for each in values) else []
        elif name != "track":
            values = [
                each
                for each in values
                if isinstance(each, str) and _is_remote(name, each, checkpoint)
            ]
        # The text is quoted, so that it can be copied into a shell.
        arguments += [f"{flag(name)} {shlex.quote(str(each)[:200])}" for each in values[:5]]
    if arguments and not is_own(run):
        none = " (or --track '' for none)" if stored.get("track") and "track" in names else ""
        raise ConfigError(
            [
                f"{run} was not made by you on this machine, so some options have to be "
                f"given again if you want them: {' '.join(arguments)}{none}"
            ]
        )


def _is_remote(option: str, value: str, checkpoint: Checkpoint) -> bool:
    there = _from(str(checkpoint.metadata.get("working_directory", "")), value, option)
    if option == "model_path":
        return not is_local(there)
    return data_value(there, option).name is not None


def run_config(run: Path, checkpoint: Checkpoint, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the options that a run had at a checkpoint, with `changes`.

    Raises ConfigError.
    """
    metadata, metadata_path = checkpoint.metadata, checkpoint.folder / "metadata.json"
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    stored = metadata.get("config")
    if not isinstance(stored, Mapping) or not stored.keys() <= fields.keys():
        raise ConfigError([f"{metadata_path} holds no options of this version of mlxtune"])
    # The run may be untrusted, so it must not choose code to run or places to write.
    stored = {name: value for name, value in stored.items() if OPTIONS[name].inherited}
    problems = [
        problem
        for name, value in changes.items()
        if (problem := _change_problem(name, value, stored.get(name, fields[name].default)))
    ]
    if problems:
        raise ConfigError(problems)
    if changes.get("init_adapter") is not None:
        find_initial(str(changes["init_adapter"]), metadata.get(INITIAL_HASH))
    working_directory = str(metadata.get("working_directory", ""))
    if "\0" in working_directory or any(
        _has_null(value) for name, value in stored.items() if OPTIONS[name].path
    ):
        raise ConfigError([f"{metadata_path} has a path with a null character"])
    stored |= _places(run, stored, working_directory)
    try:
        TrainConfig(**stored)
    except ConfigError as error:
        raise ConfigError([f"{metadata_path}: {'; '.join(error.problems)}"]) from error
    return _in_folder(run, TrainConfig(**stored | dict(changes)), changes)


def _check_output(run: Path, config: TrainConfig) -> None:
    """Raise ConfigError if a run's own options would write its adapter outside its folder."""
    output = config.output_path.resolve()
    own_folders = (run.resolve(), run.parent.resolve())
    if not any(is_same_place(output.parent, own_folder) for own_folder in own_folders):
        raise ConfigError(
            [f"--output: the run writes to {output}, outside its own folder: pass --output again"]
        )


def _in_folder(run: Path, config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the options of a run that stays in its folder, where its checkpoints and records are.

    Another --output moves only the adapter. Raises ConfigError for another --checkpoint-dir.
    """
    if is_same_place(config.checkpoint_path, run):
        return config
    if (other := changes.get("checkpoint_dir")) is not None:
        raise ConfigError(
            [
                f"--checkpoint-dir {shorten(str(other))}: a run resumes in its own folder: leave "
                f"it out, or copy {run} there and resume the copy"
            ]
        )
    return dataclasses.replace(config, checkpoint_dir=str(run))


def _change_problem(name: str, value: Any, stored: Any) -> str | None:
    """Return the problem with an option that must not differ from the run's, or None."""
    option = OPTIONS[name]
    if option.affects not in (Effect.RESULT, Effect.LENGTH):
        return None
    try:
        value = read_option(TrainConfig, name, value)
    except ConfigError as error:
        return error.problems[0]
    stored = tuple(stored) if isinstance(stored, list) else stored
    if option.affects is Effect.LENGTH:
        if isinstance(stored, int) and (value is None or value >= stored):
            return None
        if stored is None:
            return f"{flag(name)}: the run has no such limit, and may not get shorter: leave it out"
        return f"{flag(name)} can only be raised (the run has {_value_text(stored, option)})"
    if value == stored:
        return None
    shown, ours = _value_text(value, option), _value_text(stored, option)
    return (
        f"{flag(name)} {shown}: the run has {ours}, and its result depends on it: leave it out, or "
        "start a new run with --init-adapter"
    )


def _value_text(value: Any, option: Option) -> str:
    if value is None:
        return f"the default ({option.default_text})"
    return flag_value(value)


def _places(run: Path, stored: Mapping[str, Any], working_directory: str) -> dict[str, Any]:
    """Return a run's paths, resolved against its working directory; outputs follow a moved run."""
    paths: dict[str, Any] = {}
    if working_directory and Path(working_directory) != Path.cwd():
        for name, value in stored.items():
            if not (OPTIONS[name].path or name == "reward"):
                continue
            if isinstance(value, str):
                paths[name] = _from(working_directory, value, name)
            elif isinstance(value, list):
                paths[name] = [_from(working_directory, str(each), name) for each in value]
    default = stored.get("checkpoint_dir") is None and run.name == "checkpoints"
    output = adapter_path(str(paths.get("output", stored.get("output"))))
    if not default:
        return paths | {"checkpoint_dir": str(run)}
    if not is_same_place(output.parent, run.parent.resolve()):
        paths["output"] = str(run.parent / output.name)
    return paths


def _from(working_directory: str, path: str, name: str) -> str:
    """Resolve a path against the run's working directory; names of downloads stay unchanged."""
    if path.startswith(("~", "/")):
        return path
    if name == "reward":
        reward = parse_reward(path)
        return reward.with_file(lambda file: str(Path(working_directory, as_path(file))))
    there, text = Path(working_directory, path), path
    is_name = name == "model_path"
    if name in ("data", "val_data"):
        value = data_value(path, name)
        text, is_name = value.text, value.name is not None
    # Unlike Path.exists, this returns False on every system if the name is invalid.
    exists = any(os.path.exists(Path(working_directory, each)) for each in (path, text))  # noqa: PTH110
    return path if is_name and not exists else str(there)


def _has_null(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and "\0" in text for text in texts)


@dataclass(frozen=True)
class RunContext:
    """The folder in which a run was started, and the names that its records have for its files."""

    folder: Path
    files: list[str]


def context_of(checkpoint: Checkpoint) -> RunContext:
    """Return where the run of a checkpoint was started, perhaps before it resumed elsewhere."""
    about, names = dict[str, Any](), list[Any]()
    with suppress(OSError, ValueError):
        about = read_json(checkpoint.run / ABOUT)
    if isinstance(recorded := about.get(ROW_FILES), list):
        names = recorded
    else:
        with suppress(OSError, ValueError):
            names = [ledger.path for ledger in read_ledgers(checkpoint.run / LEDGER)]
    folder = get_str(about, STARTED_IN) or get_str(checkpoint.metadata, "working_directory")
    return RunContext(Path(folder), list(map(str, names)))


def check_unchanged(resume: ResumePoint, trainer: InstructTrainer) -> None:
    """Raise DataError or ModelError if the run's model or data have changed."""
    now = trainer.describe()
    for name in FACTS:
        _check_fact(resume, name, now.get(name), lambda run: _changes(run, trainer))


def check_rewards(resume: ResumePoint, reward_hash: str) -> None:
    """Raise DataError if a run's rewards have changed, before any of their code runs."""
    _check_fact(resume, "reward_hash", reward_hash)


def _check_fact(
    resume: ResumePoint,
    name: str,
    now: Any,
    changes: Callable[[Path], Iterable[str]] = lambda run: (),
) -> None:
    checkpoint = resume.checkpoint
    before = checkpoint.metadata.get(name)
    error, problem = _FACT_PROBLEMS[name]
    if before != now:
        raise error(
            problem.format(
                now=now,
                before=before,
                rows="".join(f"; {each}" for each in changes(checkpoint.run)),
                checkpoint=shlex.quote(str(checkpoint.folder)),
            )
        )


def _changes(run: Path, trainer: InstructTrainer) -> Iterator[str]:
    """Yield the number of rows of each file that differ from a run's records."""
    rows = trainer.train_rows
    try:
        before = [ledger.rows_kept for ledger in read_ledgers(run / LEDGER)]
    except (OSError, ValueError):  # the records are damaged
        return
    trained = read_trained_rows(run, lambda warning: None)
    now = np.bincount(rows.corpus.file_of_row, minlength=len(rows.corpus.files)).tolist()
    # The rows that are held out depend on the number of rows.
    new = np.bincount(
        rows.file_of_row[~np.isin(rows.identities, trained)], minlength=len(now)
    ).tolist()
    same = len(before) >= len(now) and before[: len(now)] == now
    for path, count_before, count_now, changed in zip(
        rows.corpus.paths, before, now, new, strict=False
    ):
        if count_before != count_now:
            yield f"{path} had {pluralize(count_before, 'row')} to use, and has {count_now:,}"
        elif same and len(trained) and changed:
            yield f"{pluralize(changed, 'row')} of {path} changed"


def print_resume(resume: ResumePoint, trainer: InstructTrainer, console: RunConsole) -> None:
    """Print where the run resumes, and warn of workers and versions that have changed."""
    metadata = resume.checkpoint.metadata
    now = trainer.describe()
    if (workers := metadata.get("workers", 1)) != now["workers"]:
        console.warn(
            f"the run used {_workers(workers)} and continues with {_workers(now['workers'])}: its "
            "result is the same except for rounding, but not byte for byte"
        )
    before = get_mapping(metadata, "versions")
    changed = [
        f"{name} {before.get(name, 'none')} -> {version}"
        for name, version in now["versions"].items()
        if before.get(name) != version
    ]
    if changed:
        console.warn(f"versions have changed since the run began: {', '.join(changed)}")
    step = f"step {resume.progress.step} of {trainer.total_steps}"
    console.say("Resume", f"{step}, from {resume.checkpoint.folder}")
    if line := _extension_line(resume, trainer):
        console.say("", line)
    if resume.progress.step >= trainer.total_steps:
        limit = trainer.config.max_steps
        also = f", and with it --max-steps, now {limit}" if limit == trainer.total_steps else ""
        console.say("", f"no step is left: raise --epochs to train further{also}")


def _extension_line(resume: ResumePoint, trainer: InstructTrainer) -> str:
    """Return a line on the learning rate of a run that gets more steps; empty for other runs."""
    step, before = resume.progress.step, resume.checkpoint.metadata.get("total_steps")
    if before == trainer.total_steps or not resume.progress.steps:
        return ""
    last, following = resume.progress.steps[-1].learning_rate, trainer.rate(step + 1)
    line = f"extended from {before} to {pluralize(trainer.total_steps, 'step')}: "
    if last == following:
        return f"{line}the learning rate stays {last:.3g}"
    return (
        f"{line}the learning rate restarts, from {last:.3g} at step {step} to {following:.3g} at "
        f"step {step + 1}"
    )


def _workers(described: object) -> str:
    return pluralize(described, "worker") if isinstance(described, int) else shorten(str(described))
