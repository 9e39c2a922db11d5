"""Options of `plan`, `inspect` and `bench`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mlxtune.config.data import DataConfig
from mlxtune.config.options import option
from mlxtune.config.paths import as_path
from mlxtune.config.step import StepConfig
from mlxtune.config.training import TrainConfig


@dataclasses.dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """Options of `mlxtune plan`: those of a run, whose data may be missing.

    Raises ConfigError, with every problem at once.
    """

    data: tuple[str, ...] = option(
        "data", (), "Data to plan for; without it, one example of --max-seq-len.", required=False
    )
    json: bool = option("json", False, "Print JSON for programs; docs/plan.md describes it.")


@dataclasses.dataclass(frozen=True)
class InspectConfig(DataConfig):
    """Options of `mlxtune inspect`.

    Raises ConfigError, with every problem at once.
    """

    row: int | None = option("row", None)
    json: bool = option("json", False)
    html: str | None = option("html", None)
    dump: str | None = option("dump", None)

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        html, dump = self.html_path, self.dump_path
        if html is not None and dump is not None and html.resolve() == dump.resolve():
            problems += ["--html and --dump name the same file: choose another for one of them"]
        return problems

    @property
    def html_path(self) -> Path | None:
        """The page to write, or None."""
        return None if self.html is None else as_path(self.html)

    @property
    def dump_path(self) -> Path | None:
        """The file of examples to write, or None."""
        return None if self.dump is None else as_path(self.dump)


@dataclasses.dataclass(frozen=True)
class BenchConfig(StepConfig, DataConfig):
    """Options of a benchmark of training steps. Without `against`, only this package is measured.

    Raises ConfigError, with every problem at once.
    """

    # Rows held out for validation would not be timed.
    val_split: float = option("val_split", 0.0)
    against: str | None = option("against", None)
    steps: int = option("steps", 8)
    repeats: int = option("repeats", 2)
    json: str | None = option(
        "json", None, "Write the report as JSON, - for stdout; docs/bench.md describes it."
    )
    rank: int = option("rank", 8)
    alpha: float = option("alpha", 16.0)
    lr: float = option("lr", 1e-4)
    targets: tuple[str, ...] = option("targets", ("q_proj", "v_proj"))
    num_layers: int | None = option("num_layers", None)
    order: str = option("order", "shuffle")

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.quantize == "nf4" and self.against is not None:
            problems += [f"--against {self.against} has no nf4: use another --quantize"]
        return problems

    @property
    def json_path(self) -> Path | None:
        """The file to write, or None."""
        return None if self.json in (None, "-") else as_path(str(self.json))

    def training(self, dtype: str) -> TrainConfig:
        """Return the options of the timed run: without clipping, as other trainers default."""
        return self.part(TrainConfig, dtype=dtype, schedule="constant", max_grad_norm=0.0)
