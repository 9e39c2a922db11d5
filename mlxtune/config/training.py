"""Options of a run and the parts that its modules take, and those of `plan` and `bench`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxtune.config.data import DataConfig, ModelConfig
from mlxtune.config.fields import Checked, as_path
from mlxtune.config.options import option
from mlxtune.config.ranks import init_problem, target_ranks
from mlxtune.errors import ConfigError, shorten


@dataclasses.dataclass(frozen=True)
class StepConfig(ModelConfig):
    """Which base model is trained, in which precision and memory, and how steps are computed.

    Only `dtype` and quantisation change what is learned.
    """

    quantized_compute: str = option("quantized_compute", "auto")
    grad_checkpoint: str = option("grad_checkpoint", "auto")

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.quantize == "nf4" and self.quantized_compute == "quantized":
            problems += [
                "--quantized-compute quantized: MLX has no products with nf4 weights: leave it out"
            ]
        return problems

    def loading(self) -> dict[str, Any]:
        """Return the keywords of `open_base` that load the base model as these options say."""
        return {
            "trust_remote_code": self.trust_remote_code,
            "quantize": self.quantize,
            "double_quant": self.double_quant,
            "quantized_compute": self.quantized_compute,
        }


@dataclasses.dataclass(frozen=True)
class RunConfig(Checked):
    """Where a run is written, what it prints and records, and how it shares the machine."""

    output: str = option("output", "adapters.safetensors")
    checkpoint_dir: str | None = option("checkpoint_dir", None)
    overwrite: bool = option("overwrite", False)
    wait: bool = option("wait", False)
    ignore_ledger: bool = option("ignore_ledger", False)
    allow_sleep: bool = option("allow_sleep", False)
    pause_on_battery: bool = option("pause_on_battery", False)
    log_every: int = option("log_every", 10)
    profile_interval: int = option("profile_interval", 0)
    track: tuple[str, ...] = option("track", ())
    samples: int = option("samples", 3)
    quiet: bool = option("quiet", False)

    @property
    def output_path(self) -> Path:
        """The adapter file to write."""
        return as_path(self.output)

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint folder; by default `checkpoints` next to the output."""
        if self.checkpoint_dir is None:
            return self.output_path.parent / "checkpoints"
        return as_path(self.checkpoint_dir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LoopConfig(Checked):
    """What InstructTrainingConfig and TrainConfig share."""

    schedule: str = option("schedule", "warmup-cosine")
    warmup_fraction: float = option("warmup_fraction", 0.1)
    lr_min: float = option("lr_min", 1e-6)
    max_steps: int | None = option("max_steps", None)
    order: str = option("order", "shuffle")
    val_steps: int | None = option("val_steps", None)
    save_every: int = option("save_every", 1)
    save_steps: int | None = option("save_steps", None)
    save_minutes: float = option("save_minutes", 10.0)
    keep: int = option("keep", 2)
    on_nonfinite: str = option("on_nonfinite", "skip")


@dataclasses.dataclass(frozen=True)
class InstructTrainingConfig(_LoopConfig):
    """Options of the trainer: epochs, split, validation, checkpoints, learning rate and schedule.

    `learning_rate` is the peak that the schedule scales; None takes the pipeline's.

    Raises ConfigError, with every problem at once.
    """

    epochs: int = option("epochs", 3)
    val_split: float = option("val_split", 0.2)
    early_stopping_patience: int = option("patience", 5)
    checkpoint_dir: str = option("checkpoint_dir", "checkpoints")
    seed: int = option("seed", 42)
    log_interval: int = option("log_every", 1)
    learning_rate: float | None = option("lr", None)
    batch_size: int = option("batch_size", 4)
    val_rows: int = option("val_rows", 1000)

    def contradictions(self) -> list[str]:
        return [] if self.val_split > 0 else ["--val-split must be above 0, not 0"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LoraConfig(Checked):
    """What InstructConfig and TrainConfig share."""

    targets: tuple[str, ...] = option("targets", ("q_proj", "v_proj"))
    num_layers: int | None = option("num_layers", None)
    dropout: float = option("dropout", 0.0)
    weight_decay: float = option("weight_decay", 0.01)
    target_rank: tuple[str, ...] = option("target_rank", ())
    rslora: bool = option("rslora", False)
    dora: bool = option("dora", False)
    lr_ratio: float = option("lr_ratio", 1.0)
    init: str = option("init", "lora")
    init_adapter: str | None = option("init_adapter", None)

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        try:
            target_ranks(self.target_rank)
        except ConfigError as error:
            problems += error.problems
        if problem := init_problem(self.init):
            return [*problems, problem]
        if self.init != "lora" and self.dora:
            problems.append(
                f"--init {self.init} changes the weights whose row norms --dora trains: "
                "leave one of them out"
            )
        if self.init != "lora" and self.init_adapter is not None:
            problems.append(
                f"--init {self.init} starts from the weights, --init-adapter from an adapter: "
                "leave one of them out"
            )
        return problems


@dataclasses.dataclass(frozen=True)
class InstructConfig(_LoraConfig):
    """Options of the pipeline: LoRA, optimizer, clipping.

    `learning_rate` is the default of `train_step` and `train_batch`, and the peak for a trainer
    whose config has none; a trainer passes the rate of its schedule to each step.

    Raises ConfigError, with every problem at once.
    """

    lora_rank: int = option("rank", 16)
    lora_alpha: float = option("alpha", 32.0)
    learning_rate: float = option("lr", 2e-4)
    epochs: int = option("epochs", 3)
    max_seq_len: int = option("max_seq_len", 512)
    gradient_clip_norm: float = option("max_grad_norm", 1.0)
    seed: int = option("seed", 42)


@dataclasses.dataclass(frozen=True)
class RunParts:
    """A run's options, split once into what its modules take.

    `options` holds all of them by name, as the run records them.
    """

    data: DataConfig
    lora: InstructConfig
    step: StepConfig
    training: InstructTrainingConfig
    run: RunConfig
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TrainConfig(_LoraConfig, _LoopConfig, RunConfig, StepConfig, DataConfig):
    """Options of one run, for the command and for `mlxtune.commands.train`.

    Strings are converted to a field's type, so that values may come from flags and config files
    alike.

    Raises ConfigError, with every problem at once.
    """

    rank: int = option("rank", 8)
    alpha: float = option("alpha", 16.0)
    lr: float = option("lr", 1e-4)
    epochs: int = option("epochs", 1)
    max_grad_norm: float = option("max_grad_norm", 1.0)
    patience: int = option("patience", 5)
    parallel: str = option("parallel", "data")

    def contradictions(self) -> list[str]:
        problems = [*super().contradictions(), *self._tensor_problems()]
        if self.schedule == "warmup-cosine" and self.lr_min > self.lr:
            problems += [
                f"--lr-min {self.lr_min:g} is above --lr {self.lr:g}: "
                "lower it or use another --schedule"
            ]
        return problems

    def _tensor_problems(self) -> list[str]:
        """Return what contradicts --parallel."""
        if self.parallel == "data":
            return []
        if self.parallel.startswith("tensor:"):
            return [
                f"--parallel {shorten(self.parallel)}: MLX cannot divide the workers of its ring "
                "into groups: give tensor, for a part of the model on each of them"
            ]
        if self.parallel != "tensor":
            return [f"--parallel must be data or tensor, not {shorten(self.parallel)}"]
        others = {
            "--dora": self.dora,
            f"--init {self.init}": self.init != "lora",
            "--quantize nf4": self.quantize == "nf4",
        }
        return [
            f"{name} does not work with --parallel tensor: leave one of them out"
            for name, given in others.items()
            if given
        ]

    def split(self) -> RunParts:
        """Return these options as the parts that the modules of a run take."""
        return RunParts(
            data=self.part(DataConfig),
            lora=self.lora(),
            step=self.part(StepConfig),
            training=self.training(),
            run=self.part(RunConfig),
            options=dataclasses.asdict(self),
        )

    def lora(self) -> InstructConfig:
        """Return the pipeline's part of these options."""
        return self.part(InstructConfig)

    def training(self) -> InstructTrainingConfig:
        """Return the trainer's part of these options."""
        return self.part(
            InstructTrainingConfig,
            # The trainer's own split is above 0; a run without validation gives it an empty set.
            val_split=self.val_split or InstructTrainingConfig.val_split,
            checkpoint_dir=str(self.checkpoint_path),
        )


@dataclasses.dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """Options of `mlxtune plan`: those of a run, whose data may be missing."""

    data: tuple[str, ...] = option(
        "data", (), "Data to plan for; without it, one example of --max-seq-len.", required=False
    )
    longest: bool = option("longest", False)
    workers: int = option("workers", 1)
    link: float = option("link", 10.0)
    json: bool = option("json", False, "Print JSON for programs; docs/plan.md describes it.")

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.workers > 1 and not self.data and self.parallel == "data":
            problems.append("--workers needs --data: steps are shared by their examples")
        if self.workers == 1 and self.parallel == "tensor":
            problems.append("--parallel tensor needs --workers: say how many share the model")
        return problems


@dataclasses.dataclass(frozen=True)
class BenchConfig(StepConfig, DataConfig):
    """Options of a benchmark of training steps; without `against`, only this package's."""

    # Rows held out for validation would not be timed.
    val_split: float = option("val_split", 0.0)
    against: str | None = option("against", None)
    execution: str = option("execution", "auto")
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
