"""A run as its folder describes it: finished or not, damaged, or of another version.

No file is trusted: a missing or invalid value counts as absent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlxtune.core.machine.files import read_own
from mlxtune.core.machine.lock import holder_of
from mlxtune.core.training.checkpoint import MANIFEST, METADATA, METRICS, checkpoint_folders
from mlxtune.core.training.run_folder import ABOUT, EVALUATION, LEDGER, LOCK, PREVIOUS, RESULT
from mlxtune.errors import OutputError

CHECKPOINTS = "checkpoints"
# The values of a step that charts and summaries use.
COLUMNS = (
    *("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "supervised_tokens"),
    *("rows", "seconds", "memory", "micro_batches", "run_tokens", "padding"),
)
# A step has at least these; later versions added the others.
_REQUIRED = ("step", "loss")
# Every number of a run is smaller.
_LARGEST = 2.0**63


@dataclass
class Steps:
    """The steps of a run as columns of one length; NaN for what a step did not record."""

    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> list[float]:
        return self.columns[name]

    def append(self, values: Mapping[str, Any]) -> None:
        """Add a step. This must be fast: there may be tens of thousands."""
        for name, column in self.columns.items():
            value = values.get(name)
            plain = type(value) in (float, int) and -_LARGEST < value < _LARGEST  # type: ignore[operator]
            column.append(value if plain else math.nan)  # type: ignore[arg-type]

    def known(self, *names: str) -> list[tuple[float, ...]]:
        """Return the values of some columns at the steps that recorded all of them."""
        rows = zip(*(self.columns[name] for name in names), strict=True)
        return [row for row in rows if not any(map(math.isnan, row))]

    def total(self, name: str) -> float:
        """Return the sum of a column over the steps that recorded it."""
        return math.fsum(value for (value,) in self.known(name))


@dataclass
class Run:
    """A run as its folder describes it; `problems` are sentences on what could not be read.

    `about` is run.json, `metadata` that of the newest checkpoint, `config` the options in either.
    `validations` are pairs of a step and a loss; `holder` is the process that is training it now.
    """

    folder: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    ledgers: list[Mapping[str, Any]] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    validations: list[tuple[int, float]] = field(default_factory=list)
    epochs: list[Mapping[str, Any]] = field(default_factory=list)
    skipped: list[Mapping[str, Any]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    holder: Mapping[str, Any] | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The options of the run; empty if it recorded none."""
        return mapping(self.about, "config") or mapping(self.metadata, "config")

    @property
    def name(self) -> str:
        """The folder as a user would name it, usually that of the adapter."""
        folder, suffix = self.folder, ""
        if folder.name == PREVIOUS:
            folder, suffix = folder.parent, " (previous)"
        if folder.name == CHECKPOINTS:
            folder = folder.parent
        shown = str(folder)
        return (Path.cwd().name if shown == "." else shown) + suffix


def run_folder_at(path: Path) -> Path:
    """Return the run's folder for a path to it, its parent, its adapter or one of its checkpoints.

    Raises OutputError if there is no run.
    """
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise OutputError(f"{path}: no such folder: name the folder of a run")
    if (folder / MANIFEST).exists():
        folder = folder.parent
    for place in (folder, folder / CHECKPOINTS):
        if is_run(place):
            return place
    raise OutputError(f"{path}: holds no run: name the folder of a run, or of its adapter")


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, rather than of one of its checkpoints."""
    own = any((folder / name).is_file() for name in (METRICS, ABOUT, LEDGER, RESULT))
    return not (folder / MANIFEST).exists() and (own or bool(checkpoint_folders(folder)))


def read_run(folder: Path) -> Run:
    """Read a run's folder. Whatever cannot be read is listed in `problems`."""
    run = Run(folder)
    run.about = _object(run, ABOUT)
    run.result = _object(run, RESULT)
    run.evaluation = _object(run, EVALUATION)
    _read_ledgers(run)
    _read_metrics(run)
    _read_metadata(run)
    run.holder = holder_of(folder / LOCK)
    return run


def _read_ledgers(run: Run) -> None:
    content = _read(run, LEDGER)
    if isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values()):
        # The first version mapped paths to ledgers, and had one example a row.
        content = [
            {"path": path, "examples": _kept(ledger), **ledger} for path, ledger in content.items()
        ]
    if isinstance(content, list):
        run.ledgers = [entry for entry in content if isinstance(entry, dict)]
    elif content is not None:
        run.problems.append(f"{LEDGER}: expected a list of files")


def _kept(ledger: Mapping[str, Any]) -> int:
    return sum(whole(ledger, name) or 0 for name in ("rows_train", "rows_validation"))


def _object(run: Run, name: str) -> Mapping[str, Any]:
    content = _read(run, name)
    if isinstance(content, dict):
        return content
    if content is not None:
        run.problems.append(f"{name}: expected a JSON object")
    return {}


def _read(run: Run, name: str) -> Any:
    """Return the JSON of a file; None if it is missing or cannot be read."""
    try:
        return _json(read_own(run.folder / name).decode("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        explained = str(error).startswith(name) and not isinstance(error, UnicodeDecodeError)
        run.problems.append(str(error) if explained else f"{name} is not valid JSON")
    return None


# Charts and strict JSON have no NaN and Infinity.
_json = json.JSONDecoder(parse_constant=lambda _: None).decode


def _read_metadata(run: Run) -> None:
    """Read the metadata of the newest readable checkpoint, without checking its files."""
    newest, complete = -1.0, checkpoint_folders(run.folder)
    run.checkpoints = [folder.name for folder in complete]
    # Checkpoints of the first version have no manifest, and cannot be resumed.
    every = (path.parent for path in run.folder.glob(f"*/{METADATA}"))
    for folder in sorted({*complete, *every}):
        try:
            metadata = _json(read_own(folder / METADATA).decode("utf-8"))
        except (OSError, ValueError, RecursionError):
            run.problems.append(f"{folder.name}/{METADATA} cannot be read")
            continue
        step = number(metadata, "step") if isinstance(metadata, dict) else None
        if step is not None and step > newest:
            run.metadata, newest = metadata, step


def _read_metrics(run: Run) -> None:
    try:
        content = read_own(run.folder / METRICS)
    except FileNotFoundError:
        if run.result or checkpoint_folders(run.folder):
            run.problems.append(f"{METRICS} is missing, so there are no curves")
        return
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        run.problems.append(f"{METRICS} cannot be read: {why}")
        return
    lines = content.split(b"\n")
    bad = [
        number for number, line in enumerate(lines, start=1) if line and not _add_record(run, line)
    ]
    if bad == [len(lines)]:
        run.problems.append(f"{METRICS}: its last line is incomplete")
    elif bad:
        more = f", and {len(bad) - 1:,} more" if len(bad) > 1 else ""
        run.problems.append(f"{METRICS}: line {bad[0]} is not a record of a run{more}")
    _sort_steps(run)


def _add_record(run: Run, line: bytes) -> bool:
    """Add a line's record to the run; return False if it is not one. Ignore unknown kinds."""
    try:
        values = _json(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    if not isinstance(values, dict):
        return False
    kind = values.get("kind")
    if kind == "step":
        if any(number(values, name) is None for name in _REQUIRED):
            return False
        run.steps.append(values)
    elif kind == "validation":
        step, loss = number(values, "step"), number(values, "val_loss")
        if step is None or loss is None:
            return False
        run.validations.append((int(step), loss))
    elif kind == "epoch":
        run.epochs.append(values)
    elif kind == "skipped":
        run.skipped.append(values)
    return isinstance(kind, str)


def _sort_steps(run: Run) -> None:
    """Sort the steps, and report missing and duplicate ones."""
    applied = run.steps["step"]
    skipped = [step for each in run.skipped if (step := number(each, "step")) is not None]
    if sorted([*applied, *skipped]) != list(range(1, len(applied) + len(skipped) + 1)):
        run.problems.append(f"{METRICS}: steps are missing or duplicated")
    if any(after <= before for before, after in pairwise(applied)):
        order = sorted(range(len(applied)), key=applied.__getitem__)
        for name, column in run.steps.columns.items():
            run.steps.columns[name] = [column[i] for i in order]
    run.validations.sort()


# Values of untrusted JSON


def number(values: Mapping[str, Any], *names: str) -> float | None:
    """Return the finite number under a path of names; None if there is none."""
    value = _at(values, names)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Rejects NaN and infinity too.
    return float(value) if abs(value) < _LARGEST else None


def whole(values: Mapping[str, Any], *names: str) -> int | None:
    """Return the number under a path of names without its fraction; None if there is none."""
    value = number(values, *names)
    return None if value is None else int(value)


def text(values: Mapping[str, Any], *names: str) -> str:
    """Return the text under a path of names, or an empty one."""
    value = _at(values, names)
    return value if isinstance(value, str) else ""


def mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object under a name, or an empty one."""
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def objects(values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the objects of the list under a name, or an empty list."""
    value = values.get(name)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _at(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    value: Any = values
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
