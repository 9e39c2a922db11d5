"""The expected cost of a run: memory, steps and time."""

from dataclasses import asdict, dataclass
from typing import Any

from mlxtune.core.run.speed import Speed
from mlxtune.core.steps.memory_plan import MemoryPlan
from mlxtune.core.steps.scaling import Scaling


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
            "padding_share": round(self.memory.padding_share, 4),
            "run_share": round(self.memory.run_share, 4),
        }
