"""The speed of the last training of each model, saved for later plans."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxtune.core.files.files import make_folder, read_json, write_json
from mlxtune.core.run.metrics import StepRecord
from mlxtune.errors import OutputError

FILE = "speeds.json"
# A run needs this many steps; the first is not timed, because it may include compilation.
_MIN_STEPS = 3


@dataclass(frozen=True)
class Speed:
    """Tokens per second, without padding, and the day they were measured, as YYYY-MM-DD."""

    tokens_per_s: float
    measured: str


def speed_of(steps: Sequence[StepRecord], today: str) -> Speed | None:
    """Return the speed of a run; None if it was too short."""
    if len(steps) < _MIN_STEPS:
        return None
    tokens, seconds = sum(s.tokens for s in steps[1:]), sum(s.seconds for s in steps[1:])
    return Speed(tokens / seconds, today) if tokens and seconds > 0 else None


def read_speed(cache: Path | None, key: str) -> Speed | None:
    """Return the speed saved under a key; None if there is none."""
    entry: Any = _read(cache).get(key) if cache is not None else None
    with suppress(TypeError):
        speed = Speed(**entry)
        return speed if speed.tokens_per_s > 0 else None
    return None


def save_speed(cache: Path | None, key: str, speed: Speed) -> None:
    """Save a speed under a key, if the folder can be written."""
    if cache is None:
        return
    with suppress(OutputError):
        make_folder(cache)
        write_json(cache / FILE, {**_read(cache), key: asdict(speed)})


def _read(cache: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_json(cache / FILE)
    return {}
