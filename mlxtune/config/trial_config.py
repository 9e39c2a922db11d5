"""Options of plan, bench, reward and the demo, which predict, time, prepare or show a run."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxtune.config.data_config import DataConfig, field_problems
from mlxtune.config.fields import CheckedConfig, as_path, reuse_option
from mlxtune.config.objective_config import REWARD_NAMES, RewardedConfig
from mlxtune.config.option import BENCH, COMMAND, FILES, PLAN, RUN
from mlxtune.config.train_config import StepConfig, TrainConfig

_PACKAGE = Path(__file__).resolve().parents[1]
# Demo files: inside the package in a wheel, in data/ in a clone or an editable install.
_PACKAGED_DEMO, _CLONED_DEMO = _PACKAGE / "demo", _PACKAGE.parent / "data"
MODEL, DATA = "demo-qwen3", "bookings.jsonl"


@dataclasses.dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """Options of `mlxtune plan`: the options of a run, with optional data."""

    data: tuple[str, ...] = reuse_option(
        TrainConfig,
        "data",
        (),
        "Data to plan for; without it, one example of --max-seq-len tokens.",
        required=False,
    )
    longest: bool = PLAN.option(
        False, "Print the length of the longest example that fits in --memory-limit.", COMMAND
    )
    workers: int = PLAN.option(
        1, "Machines to plan for, each with one worker of mlx.launch.", COMMAND, at_least=1
    )
    link: float = PLAN.option(
        10.0, "Bandwidth between the machines, in Gbit/s.", COMMAND, above=0, metavar="GBPS"
    )
    json: bool = RUN.option(False, "Print JSON for programs; docs/plan.md describes it.", COMMAND)

    def contradictions(self) -> Iterator[str]:
        if self.workers > 1 and not self.data and self.parallel == "data":
            yield "--workers needs --data: the workers share the examples of each step"
        if self.workers == 1 and self.parallel == "tensor":
            yield "--parallel tensor needs --workers: set it to their number"


@dataclasses.dataclass(frozen=True)
class BenchConfig(StepConfig):
    """Options of a benchmark of training steps in mlxtune and, with `against`, in a peer."""

    _: dataclasses.KW_ONLY
    # Rows held out for validation would not be timed.
    val_split: float = reuse_option(DataConfig, "val_split", 0.0)
    against: str | None = BENCH.option(
        None, "Also measure another trainer on the same steps.", COMMAND, choices=("mlx-lm",)
    )
    execution: str = BENCH.option(
        "auto",
        "How mlxtune computes: auto as train does, gpu as on Metal and CUDA, cpu as on Linux, "
        "plain as the reference.",
        COMMAND,
        choices=("auto", "gpu", "cpu", "plain"),
    )
    steps: int = BENCH.option(
        8, "Optimizer steps to time, from the start of an epoch.", COMMAND, at_least=1
    )
    repeats: int = BENCH.option(
        2,
        "Number of times to measure each contestant, each time in a new process.",
        COMMAND,
        at_least=1,
    )
    json: str | None = RUN.option(
        None, "Write the report as JSON to a file, or - for stdout; see docs/bench.md.", COMMAND
    )

    def contradictions(self) -> Iterator[str]:
        if self.is_rewarded:
            yield f"--objective {self.objective}: bench times the other objectives: leave it out"
        if self.objective != "sft" and self.against is not None:
            yield f"--against {self.against} does not support {self.objective}: leave it out"
        if self.quantize == "nf4" and self.against is not None:
            yield f"--against {self.against} does not support nf4: use another --quantize"

    @property
    def json_path(self) -> Path | None:
        return None if self.json in (None, "-") else as_path(str(self.json))

    def training(self, dtype: str) -> TrainConfig:
        """Return the options of the timed run.

        Clipping is off, as it is by default in other trainers. The plan estimates the memory, and
        uses no cached measurement.
        """
        own: dict[str, Any] = {"schedule": "constant", "max_grad_norm": 0.0, "no_cache": True}
        return self.part(TrainConfig, dtype=dtype, **own)


@dataclasses.dataclass(frozen=True)
class RewardConfig(CheckedConfig):
    """Options of `mlxtune reward`. Raises ConfigError, which lists every problem."""

    reward: tuple[str, ...] = RUN.option(
        (),
        f"Rewards to try: {REWARD_NAMES}.",
        COMMAND,
        required=True,
        several=True,
        metavar="REWARD",
        argument="a REWARD, such as json",
    )
    data: tuple[str, ...] = reuse_option(
        DataConfig,
        "data",
        help="Data of prompts: any that train reads, or rows with only a 'prompt' and keys for the "
        "reward; may be repeated.",
    )
    answers: str | None = FILES.option(
        None,
        "File of answers to score, as mlxtune generate --data writes it; default: each row's own "
        "answer, another row's, and none.",
        COMMAND,
        path=True,
    )
    rows: int = RUN.option(8, "Number of rows to try, from the first.", COMMAND, at_least=1)
    format: str = reuse_option(
        DataConfig,
        "format",
        choices=("auto", "chat", "prompt", "alpaca", "sharegpt", "chatgpt", "gemini"),
    )
    field: tuple[str, ...] = reuse_option(DataConfig, "field")
    reward_timeout: float = reuse_option(RewardedConfig, "reward_timeout")
    json: bool = RUN.option(False, "Print JSON for programs.", COMMAND)

    def contradictions(self) -> Iterator[str]:
        yield from field_problems(self.field)
        if self.answers is not None and len(self.data) > 1:
            yield "--answers belong to one file: give one --data"


def demo_file(name: str) -> Path:
    """Return the path of a demo model's folder or of the demo's data file, by its name."""
    return (_PACKAGED_DEMO if _PACKAGED_DEMO.is_dir() else _CLONED_DEMO) / name


@dataclasses.dataclass(frozen=True)
class DemoConfig(CheckedConfig):
    """Options of the demo: a small model learns to answer a guest's message with JSON.

    `train(DemoConfig().training())` runs it from Python.

    Raises ConfigError, which lists every problem.
    """

    output: str = reuse_option(TrainConfig, "output", "mlxtune-demo/adapters.safetensors")
    max_steps: int | None = reuse_option(TrainConfig, "max_steps")
    overwrite: bool = reuse_option(TrainConfig, "overwrite")
    quiet: bool = reuse_option(TrainConfig, "quiet")

    def training(self) -> TrainConfig:
        """Return the options of the demo's run."""
        model, data = str(demo_file(MODEL)), str(demo_file(DATA))
        return self.part(TrainConfig, model_path=model, data=(data,), targets=("all",), lr=5e-3)
