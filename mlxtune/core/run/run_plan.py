"""The expected cost of a run: memory, steps and time, from what earlier runs measured."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxtune.core.files.reading import read_json
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.files.writing import make_folder, write_json
from mlxtune.core.run.metrics import StepRecord
from mlxtune.core.steps.memory_plan import MemoryPlan
from mlxtune.core.steps.memory_terms import MemoryCorrection
from mlxtune.core.steps.scaling import Scaling
from mlxtune.errors import OutputError

# A model's speed and memory, measured by runs and cached for later plans.
FILE, MEMORY_FILE = "speeds.json", "memory.json"
# Shorter runs are not measured: longer runs have another speed. A run's first step is not
# timed, as it may include compilation.
_MIN_STEPS, _MIN_SECONDS = 3, 1.0


@dataclass(frozen=True)
class Speed:
    """Tokens per second, without padding, and the day of the measurement, as YYYY-MM-DD."""

    tokens_per_s: float
    measured: str


@dataclass(frozen=True)
class LongestFit:
    """The number of tokens of the longest example that fits, with activations kept or recomputed.

    Neither number exceeds `context`, the model's own limit.
    """

    kept: int
    recomputed: int
    context: int


@dataclass(frozen=True)
class RunPlan:
    """The expected cost of a run; without data, only the memory of the longest example.

    `expert_matrices` counts the matrices of experts that get LoRA. `larger_limit` describes the
    gain from a larger --memory-limit, if any. `tokens` and `supervised` count the training rows'
    tokens, `all_tokens` the tokens of all steps. With `scaling`, `memory` is the memory of one
    worker. `few_steps` is the advice if the run is too short; `free_memory` counts bytes that are
    free now, None if unknown.
    """

    model: str
    dtype: str
    device: str
    max_seq_len: int
    memory: MemoryPlan
    lora: str = ""
    trainable_parameters: int = 0
    expert_matrices: int = 0
    larger_limit: str = ""
    rows: int = 0
    steps_per_epoch: int = 0
    steps: int = 0
    tokens: int = 0
    supervised: int = 0
    all_tokens: int = 0
    speed: Speed | None = None
    scaling: Scaling | None = None
    longest: LongestFit | None = None
    few_steps: str = ""
    free_memory: int | None = None

    @property
    def seconds(self) -> float | None:
        """The time of all steps; None without a known speed or without data."""
        if not self.speed or not self.steps:
            return None
        gain = self.scaling.speedup if self.scaling else None
        return self.all_tokens / self.speed.tokens_per_s / (gain or 1)

    def as_dict(self) -> dict[str, Any]:
        plan, execution, peak = self.memory, self.memory.execution, self.memory.peak
        return {
            "model": self.model,
            "lora": {
                "description": self.lora,
                "trainable_parameters": self.trainable_parameters,
                "expert_matrices": self.expert_matrices,
            },
            "dtype": self.dtype,
            "device": self.device,
            "max_seq_len": self.max_seq_len,
            "micro_batch_tokens": execution.micro_batch_tokens,
            "grad_checkpoint": execution.recompute,
            "loss_chunk": execution.loss_chunk,
            "memory": {"limit": plan.limit, "peak": peak.total, **asdict(peak)},
            "free_memory": self.free_memory,
            "measured": plan.shapes.measured is not None,
            "larger_limit": self.larger_limit or None,
            "longest": None if self.longest is None else asdict(self.longest),
            "data": self._data() if self.steps else None,
            "workers": None if self.scaling is None else self.scaling.as_dict(),
            "speed": None if self.speed is None else asdict(self.speed),
            "seconds": self.seconds,
        }

    def _data(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "steps_per_epoch": self.steps_per_epoch,
            "steps": self.steps,
            "micro_batches_per_step": round(self.memory.micro_batches_per_step, 3),
            "padding_share": round(self.memory.padding_fraction, 4),
            "run_share": round(self.memory.forward_fraction, 4),
        }


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


def read_measured(cache: Path | None, key: str) -> MemoryCorrection | None:
    return MemoryCorrection.of(_read(cache, MEMORY_FILE).get(key))


def save_measured(cache: Path | None, key: str, measured: MemoryCorrection) -> None:
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
