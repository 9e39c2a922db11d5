"""A run as its folder describes it: finished or not, perhaps damaged.

No file is trusted: a missing or invalid value counts as absent.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mlxtune.config.limits import OWN_JSON_LIMITS, TooLargeError, parse_json
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.evaluation.outcome import AnswersAtStep, Evaluation, parse_evaluation
from mlxtune.core.files.lock import holder_of
from mlxtune.core.files.reading import read_json, read_own
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.run.checkpoint import MANIFEST, METADATA, METRICS, checkpoint_folders
from mlxtune.core.run.metrics import SkippedStep, StepRecord
from mlxtune.core.run.progress import Progress, Record, parse_records
from mlxtune.core.run.run_folder import (
    ABOUT,
    EVALUATION,
    LEDGER,
    LIVE_ANSWERS,
    LOCK,
    RESULT,
    previous_number,
)
from mlxtune.errors import OutputError

CHECKPOINTS = "checkpoints"
# The files that identify the folder of a run.
_RUN_FILES = {METRICS, ABOUT}
# Large folders that never contain runs.
_SKIPPED_FOLDERS = ("node_modules", "site-packages", "__pycache__", "proc", "sys", "dev")
# The largest number in a run's JSON files.
_MAX_INT = 2**63

T = TypeVar("T")


@dataclass
class Run:
    """A run as described by its folder; `problems` describe missing and invalid files.

    `about` is run.json, `metadata` the metadata.json of the newest checkpoint; `holder` is the note
    of the process that trains in the folder now.
    """

    folder: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    samples: AnswersAtStep | None = None
    ledgers: list[Ledger] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    checkpoints: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    holder: Mapping[str, Any] | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The options of the run; empty if they could not be read."""
        return get_mapping(self.about, "config")

    def column(self, name: str) -> Sequence[float]:
        return self.progress.steps.column(name)

    @property
    def name(self) -> str:
        """The folder as a user would name it, usually the folder of the adapter."""
        folder = self.folder.parent if self.folder.name == CHECKPOINTS else self.folder
        return Path.cwd().name if str(folder) == "." else str(folder)


def run_folder_at(path: Path) -> Path:
    """Return a run's folder, given the path of the folder, its parent, an adapter or a checkpoint.

    Raises OutputError if there is no run.
    """
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise OutputError(f"{path}: no such folder: name the folder of a run")
    if (folder / MANIFEST).exists():
        folder = folder.parent
    for candidate in (folder, folder / CHECKPOINTS):
        if any((candidate / name).is_file() for name in _RUN_FILES) or checkpoint_folders(
            candidate
        ):
            is_adapter = path.suffix == ".safetensors" and folder == path.parent
            return _run_of(path, candidate) if is_adapter and path.is_file() else candidate
    raise OutputError(f"{path} holds no run: name the folder of a run, or of its adapter")


def _run_of(adapter: Path, run: Path) -> Path:
    """Return the run that wrote an adapter: the run in the folder `run` or an earlier run in it."""
    earlier = [path for path in run.iterdir() if previous_number(path.name) is not None]
    earlier.sort(key=lambda each: previous_number(each.name) or 0, reverse=True)
    names = [_written_name(each) for each in (run, *earlier)]
    if adapter.name in names:
        return (run, *earlier)[names.index(adapter.name)]
    if not names[0]:  # not finished, or damaged
        return run
    raise OutputError(f"{adapter}: its run is missing: {run} is the run of {names[0]}")


def _written_name(run: Path) -> str:
    """Return the file name of the adapter that a run wrote; empty if unknown."""
    with suppress(OSError, ValueError):
        return Path(get_str(read_json(run / RESULT), "adapter")).name
    return ""


def find_runs(folder: Path, depth: int = 6) -> Iterator[Path]:
    """Yield the folders of runs in a folder and up to `depth` levels below, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            is_folder = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except OSError:
        return
    if is_folder.keys() & {MANIFEST, "pyvenv.cfg"}:
        return
    if is_folder.keys() & _RUN_FILES:
        yield folder
        # Below a run's folder, only earlier runs are searched.
        earlier = [name for name in is_folder if previous_number(name) is not None]
        is_folder = {name: is_folder[name] for name in earlier}
    for name in sorted(is_folder):
        if depth and is_folder[name] and name not in _SKIPPED_FOLDERS and not name.startswith("."):
            yield from find_runs(folder / name, depth - 1)


def read_run(folder: Path) -> Run:
    """Read a run's folder. Unreadable files are listed in `problems`."""
    run = Run(folder, holder=holder_of(folder / LOCK))
    run.about = _read(run, ABOUT, read_json, {})
    run.result = _read(run, RESULT, read_json, {})
    run.evaluation = _read(run, EVALUATION, read_evaluation, None)
    run.samples = _read(run, LIVE_ANSWERS, read_validation_answers, None)
    run.ledgers = _read(run, LEDGER, read_ledgers, [])
    run.checkpoints = [folder.name for folder in checkpoint_folders(folder)]
    # These checkpoints are not verified.
    every: list[dict[str, Any]] = [
        _read(run, f"{name}/{METADATA}", read_json, {}) for name in run.checkpoints
    ]
    run.metadata = max(every, key=lambda each: number(each, "step") or 0, default={})
    _read_metrics(run)
    return run


def _read(run: Run, name: str, read: Callable[[Path], T], missing: T) -> T:
    path = run.folder / name
    try:
        return read(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror}")
    except ValueError as error:
        # The error names the file, but not its folder.
        run.problems.append(f"{name.removesuffix(path.name)}{error}")
    return missing


def read_evaluation(path: Path) -> Evaluation | None:
    """Read evaluation.json. Raises OSError, or ValueError if the file is invalid."""
    values = read_json(path)
    try:
        return parse_evaluation(values)
    except ValueError as error:
        raise ValueError(f"{path.name} is not an evaluation") from error


def read_validation_answers(path: Path) -> AnswersAtStep:
    """Read samples.json. Raises OSError, or ValueError if the file is invalid."""
    values = read_json(path)
    try:
        samples: AnswersAtStep = from_json(AnswersAtStep, values)
        return samples
    except ValueError as error:
        raise ValueError(f"{path.name} holds no samples") from error


def read_ledgers(path: Path) -> list[Ledger]:
    """Read ledger.json. Raises OSError, or ValueError if the file is invalid."""
    try:
        values = parse_json(read_own(path, OWN_JSON_LIMITS), OWN_JSON_LIMITS, path.name)
        ledgers: list[Ledger] = from_json(list[Ledger], values)
        return ledgers
    except TooLargeError:
        raise
    except ValueError as error:
        raise ValueError(f"{path.name} is not a list of ledgers") from error


def _read_metrics(run: Run) -> None:
    content = _read(run, METRICS, read_own, b"")
    if not (run.folder / METRICS).exists() and (run.result or run.checkpoints):
        run.problems.append(f"{METRICS} is missing, so there are no curves")
    progress = run.progress
    first, bad, lines = 0, 0, 0
    try:
        for lines, record in enumerate(parse_records(content), start=1):
            if not _add_record(progress, record):
                first, bad = first or lines, bad + 1
    except TooLargeError as error:
        run.problems.append(str(error))
    if bad == 1 and first == lines and not content.endswith(b"\n"):
        run.problems.append(f"{METRICS}: its last line is incomplete")
    elif bad:
        more = f", with {bad - 1:,} more like it" if bad > 1 else ""
        run.problems.append(f"{METRICS}: line {first} is not the next record of the run{more}")
    if progress.step != len(progress.steps) + len(progress.skipped):
        run.problems.append(f"{METRICS}: steps are missing")


def _add_record(progress: Progress, record: Record | ValueError) -> bool:
    """Add a line's record; return False if it is invalid or not later than the last step."""
    if isinstance(record, ValueError):
        return False
    if isinstance(record, StepRecord | SkippedStep) and record.step <= progress.step:
        return False
    progress.append(record)
    return True


# Values of untrusted JSON


def number(values: Mapping[str, Any], *names: str) -> float | None:
    """Return the finite number under nested keys; None if there is no such number."""
    value = _value_at(values, names)
    # Rejects NaN and infinity too.
    return float(value) if type(value) in (int, float) and abs(value) < _MAX_INT else None


def get_int(values: Mapping[str, Any], *names: str) -> int | None:
    """Return the number under nested keys, truncated to an integer; None if there is no number."""
    value = number(values, *names)
    return None if value is None else int(value)


def get_str(values: Mapping[str, Any], *names: str) -> str:
    """Return the string under nested keys, or an empty string."""
    value = _value_at(values, names)
    return value if isinstance(value, str) else ""


def get_mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object under a key, or an empty object."""
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def _value_at(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    value: Any = values
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
