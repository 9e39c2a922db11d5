"""A model's speed and memory, measured by runs and cached for later plans."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxtune.core.files.reading import read_json
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.files.writing import make_folder, write_json
from mlxtune.core.run.metrics import StepRecord
from mlxtune.core.steps.memory_terms import Measured
from mlxtune.errors import OutputError

FILE, MEMORY_FILE = "speeds.json", "memory.json"
# Shorter runs are not measured: longer runs have another speed. A run's first step is not
# timed, as it may include compilation.
_MIN_STEPS, _MIN_SECONDS = 3, 1.0


@dataclass(frozen=True)
class Speed:
    """Tokens per second, without padding, and the day of the measurement, as YYYY-MM-DD."""

    tokens_per_s: float
    measured: str


def speed_of(steps: Sequence[StepRecord], today: str) -> Speed | None:
    """Return the speed of a run's steps; None if they are too few or took too little time."""
    if len(steps) < _MIN_STEPS:
        return None
    tokens, seconds = sum(s.tokens for s in steps[1:]), sum(s.seconds for s in steps[1:])
    return Speed(tokens / seconds, today) if tokens and seconds >= _MIN_SECONDS else None


def read_speed(cache: Path | None, key: str) -> Speed | None:
    with suppress(ValueError):
        speed: Speed = from_json(Speed, _read(cache, FILE).get(key))
        return speed if speed.tokens_per_s > 0 else None
    return None


def save_speed(cache: Path | None, key: str, speed: Speed) -> None:
    _save(cache, FILE, key, asdict(speed))


def read_measured(cache: Path | None, key: str) -> Measured | None:
    return Measured.of(_read(cache, MEMORY_FILE).get(key))


def save_measured(cache: Path | None, key: str, measured: Measured) -> None:
    _save(cache, MEMORY_FILE, key, asdict(measured))


def _read(cache: Path | None, name: str) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_json(cache / name) if cache is not None else {}
    return {}


def _save(cache: Path | None, name: str, key: str, entry: dict[str, Any]) -> None:
    if cache is None:
        return
    with suppress(OutputError):
        make_folder(cache)
        write_json(cache / name, {**_read(cache, name), key: entry})
