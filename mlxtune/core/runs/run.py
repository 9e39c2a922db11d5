"""What a run's folder says of the run, whether it ended or not, is damaged, or of another version.

Nothing in it is trusted: what is missing, or is not what it should be, is as if it were not there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlxtune.core.machine.files import read_own
from mlxtune.core.machine.lock import holder_of
from mlxtune.core.training.checkpoint import MANIFEST, METADATA, METRICS, checkpoint_folders
from mlxtune.core.training.run_folder import ABOUT, EVALUATION, LEDGER, LOCK, RESULT
from mlxtune.errors import OutputError

CHECKPOINTS = "checkpoints"
# What a chart is drawn of, of each step.
COLUMNS = (
    *("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "supervised_tokens"),
    *("rows", "seconds", "memory", "micro_batches", "run_tokens", "padding"),
)
# Without these, a step is none; the others came with later versions.
_NEEDED = ("step", "loss")
# No number of a run is larger.
_LARGEST = 2.0**63


@dataclass
class Steps:
    """The steps of a run in columns of one length; NaN where a step does not say."""

    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> list[float]:
        return self.columns[name]

    def append(self, values: Mapping[str, Any]) -> None:
        """Add a step, of which there may be tens of thousands."""
        for name, column in self.columns.items():
            value = values.get(name)
            plain = type(value) in (float, int) and -_LARGEST < value < _LARGEST  # type: ignore[operator]
            column.append(value if plain else math.nan)  # type: ignore[arg-type]

    def measured(self, name: str) -> list[float]:
        """Return a column in which 0, for what was not measured, is NaN too."""
        return [value or math.nan for value in self.columns[name]]

    def total(self, name: str) -> float:
        """Return the sum over the steps that say."""
        return math.fsum(value for value in self.columns[name] if not math.isnan(value))


@dataclass
class Run:
    """A run as its folder tells it. `problems` say in words what is wrong with that.

    `about` is run.json, `metadata` that of its newest checkpoint, `config` the options from either.
    `validations` are pairs of a step and a loss. `holder` is the process that trains here now.
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
        """The options of the run, none where it does not say."""
        return mapping(self.about, "config") or mapping(self.metadata, "config")

    @property
    def name(self) -> str:
        """The folder as a person would name it: that of the adapter, mostly."""
        folder, aside = self.folder, ""
        if folder.name == "previous":
            folder, aside = folder.parent, " (previous)"
        if folder.name == CHECKPOINTS:
            folder = folder.parent
        shown = str(folder)
        return (Path.cwd().name if shown == "." else shown) + aside


def run_folder_at(path: Path) -> Path:
    """Return the folder of the run that a path names: it, its adapter, a checkpoint, or its parent.

    Raises OutputError where there is none.
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
    """Tell whether a folder is that of a run, and not of one of its checkpoints."""
    own = any((folder / name).is_file() for name in (METRICS, ABOUT, LEDGER, RESULT))
    return not (folder / MANIFEST).exists() and (own or bool(checkpoint_folders(folder)))


def read_run(folder: Path) -> Run:
    """Read all that a run's folder says. What cannot be read is among its problems."""
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
    found = _read(run, LEDGER)
    if isinstance(found, dict) and all(isinstance(entry, dict) for entry in found.values()):
        # Of the first version, which had them by their paths, and one example a row.
        found = [{"path": path, "examples": _kept(entry), **entry} for path, entry in found.items()]
    if isinstance(found, list):
        run.ledgers = [entry for entry in found if isinstance(entry, dict)]
    elif found is not None:
        run.problems.append(f"{LEDGER} holds no list of files")


def _kept(ledger: Mapping[str, Any]) -> int:
    return sum(whole(ledger, name) or 0 for name in ("rows_train", "rows_validation"))


def _object(run: Run, name: str) -> Mapping[str, Any]:
    found = _read(run, name)
    if isinstance(found, dict):
        return found
    if found is not None:
        run.problems.append(f"{name} holds no JSON object")
    return {}


def _read(run: Run, name: str) -> Any:
    """Return the JSON of a file, None where it is missing or cannot be read."""
    try:
        return _json(read_own(run.folder / name).decode("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        known = str(error).startswith(name) and not isinstance(error, UnicodeDecodeError)
        run.problems.append(str(error) if known else f"{name} is not valid JSON")
    return None


# Neither a chart nor JSON for programs has a place for NaN and Infinity.
_json = json.JSONDecoder(parse_constant=lambda _: None).decode


def _read_metadata(run: Run) -> None:
    """Take in what the newest checkpoint that can be read says; its files are not compared."""
    newest, good = -1.0, checkpoint_folders(run.folder)
    run.checkpoints = [folder.name for folder in good]
    # Those of the first version have no manifest, and cannot be gone on from.
    first = (path.parent for path in run.folder.glob(f"*/{METADATA}"))
    for folder in sorted({*good, *first}):
        try:
            found = _json(read_own(folder / METADATA).decode("utf-8"))
        except (OSError, ValueError, RecursionError):
            run.problems.append(f"{folder.name}/{METADATA} cannot be read")
            continue
        step = number(found, "step") if isinstance(found, dict) else None
        if step is not None and step > newest:
            run.metadata, newest = found, step


def _read_metrics(run: Run) -> None:
    try:
        content = read_own(run.folder / METRICS)
    except FileNotFoundError:
        if run.result or checkpoint_folders(run.folder):
            run.problems.append(f"{METRICS} is missing: there is nothing to draw")
        return
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        run.problems.append(f"{METRICS} cannot be read: {why}")
        return
    bad: list[int] = []
    lines = content.split(b"\n")
    for number_, line in enumerate(lines, start=1):
        if line and not _take_in(run, line):
            bad.append(number_)
    if bad == [len(lines)]:
        run.problems.append(f"{METRICS}: its last line is cut off")
    elif bad:
        more = f", and {len(bad) - 1:,} more" if len(bad) > 1 else ""
        run.problems.append(f"{METRICS}: line {bad[0]} is no record of a run{more}")
    _put_in_order(run)


def _take_in(run: Run, line: bytes) -> bool:
    """Add a line's record to the run; tell whether it is one. Kinds that are unknown are left."""
    try:
        values = _json(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    if not isinstance(values, dict):
        return False
    kind = values.get("kind")
    if kind == "step":
        if any(number(values, name) is None for name in _NEEDED):
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


def _put_in_order(run: Run) -> None:
    """Say where steps are missing or come twice, and bring them into their order."""
    taken = run.steps["step"]
    skipped = [number(each, "step") for each in run.skipped]
    every = sorted([*taken, *(step for step in skipped if step is not None)])
    if every != [float(step) for step in range(1, len(every) + 1)]:
        run.problems.append(f"{METRICS}: steps are missing or come twice")
    if any(after <= before for before, after in pairwise(taken)):
        order = sorted(range(len(taken)), key=taken.__getitem__)
        for name, column in run.steps.columns.items():
            run.steps.columns[name] = [column[i] for i in order]
    run.validations.sort()


# What others wrote, as what it should be


def number(values: Mapping[str, Any], *names: str) -> float | None:
    """Return the finite number under a name, or under names within each other; None for none."""
    value: Any = values
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # So is neither NaN nor infinity.
    return float(value) if abs(value) < _LARGEST else None


def whole(values: Mapping[str, Any], *names: str) -> int | None:
    """Return the number under a name as a whole one; None where there is none."""
    value = number(values, *names)
    return None if value is None else int(value)


def text(values: Mapping[str, Any], *names: str) -> str:
    """Return the text under a name, empty where there is none."""
    value: Any = values
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""


def mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object under a name, empty where there is none."""
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def objects(values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the objects of the list under a name, empty where there is none."""
    value = values.get(name)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
