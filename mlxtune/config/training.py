"""Options of a run, and the parts of them that trainer and pipeline take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mlxtune.config.data import DataConfig
from mlxtune.config.fields import Checked
from mlxtune.config.lora import lora_problems
from mlxtune.config.options import option
from mlxtune.config.paths import as_path
from mlxtune.config.quantization import quantization_problems

# Each is an extra of the package.
TRACKERS = ("trackio", "tensorboard", "wandb")


@dataclasses.dataclass(frozen=True)
class TrainConfig(DataConfig):
    """Options of one run, for the command and for `mlxtune.recipes.train`.

    Strings are converted to a field's type, so that values may come from flags and config files
    alike.

    Raises ConfigError, with every problem at once.
    """

    output: str = option("output", "adapters.safetensors")
    checkpoint_dir: str | None = option("checkpoint_dir", None)
    rank: int = option("rank", 8)
    alpha: float = option("alpha", 16.0)
    lr: float = option("lr", 1e-4)
    epochs: int = option("epochs", 1)
    targets: tuple[str, ...] = option("targets", ("q_proj", "v_proj"))
    memory_limit: float = option("memory_limit", 24.0)
    schedule: str = option("schedule", "warmup-cosine")
    warmup_fraction: float = option("warmup_fraction", 0.1)
    lr_min: float = option("lr_min", 1e-6)
    weight_decay: float = option("weight_decay", 0.01)
    max_grad_norm: float = option("max_grad_norm", 1.0)
    patience: int = option("patience", 5)
    save_every: int = option("save_every", 1)
    save_steps: int | None = option("save_steps", None)
    save_minutes: float = option("save_minutes", 10.0)
    keep: int = option("keep", 2)
    overwrite: bool = option("overwrite", False)
    on_nonfinite: str = option("on_nonfinite", "skip")
    wait: bool = option("wait", False)
    ignore_ledger: bool = option("ignore_ledger", False)
    num_layers: int | None = option("num_layers", None)
    dropout: float = option("dropout", 0.0)
    max_steps: int | None = option("max_steps", None)
    order: str = option("order", "shuffle")
    dtype: str = option("dtype", "auto")
    quantize: str | None = option("quantize", None)
    double_quant: bool = option("double_quant", False)
    quantized_compute: str = option("quantized_compute", "auto")
    grad_checkpoint: str = option("grad_checkpoint", "auto")
    compile: str = option("compile", "auto")
    log_every: int = option("log_every", 10)
    profile_interval: int = option("profile_interval", 0)
    track: tuple[str, ...] = option("track", ())
    target_rank: tuple[str, ...] = option("target_rank", ())
    rslora: bool = option("rslora", False)
    dora: bool = option("dora", False)
    lr_ratio: float = option("lr_ratio", 1.0)
    init: str = option("init", "lora")
    init_adapter: str | None = option("init_adapter", None)
    samples: int = option("samples", 3)

    def contradictions(self) -> list[str]:
        problems = super().contradictions() + lora_problems(self)
        if self.schedule == "warmup-cosine" and self.lr_min > self.lr:
            problems += [
                f"--lr-min {self.lr_min:g} is above --lr {self.lr:g}: "
                "lower it or use another --schedule"
            ]
        if unknown := [name for name in self.trackers if name not in TRACKERS]:
            names = ", ".join(map(repr, unknown))
            problems += [f"--track must be one of {', '.join(TRACKERS)}, not {names}"]
        return problems + quantization_problems(
            self.quantize, self.quantized_compute, double_quant=self.double_quant
        )

    def base(self) -> dict[str, Any]:
        """Return how the base model is to be loaded, as keywords of `open_base`."""
        return {
            "trust_remote_code": self.trust_remote_code,
            "quantize": self.quantize,
            "double_quant": self.double_quant,
            "quantized_compute": self.quantized_compute,
        }

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names after --track, each once."""
        names = (name.strip() for given in self.track for name in given.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def output_path(self) -> Path:
        """The adapter file to write."""
        return as_path(self.output)

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint folder; by default `checkpoints` beside the output."""
        if self.checkpoint_dir is None:
            return self.output_path.parent / "checkpoints"
        return as_path(self.checkpoint_dir)

    def training(self) -> InstructTrainingConfig:
        """Return the trainer's part of these options."""
        names = {field.name for field in dataclasses.fields(InstructTrainingConfig)}
        shared = {name: value for name, value in vars(self).items() if name in names}
        # The trainer's own split is above 0; a run without validation hands it an empty set.
        shared["val_split"] = self.val_split or InstructTrainingConfig.val_split
        return InstructTrainingConfig(
            **shared
            | {
                "early_stopping_patience": self.patience,
                "checkpoint_dir": str(self.checkpoint_path),
                "learning_rate": self.lr,
                "log_interval": self.log_every,
            }
        )

    def pipeline(self) -> InstructConfig:
        """Return the pipeline's part of these options."""
        names = {field.name for field in dataclasses.fields(InstructConfig)}
        shared = {name: value for name, value in vars(self).items() if name in names}
        return InstructConfig(
            **shared
            | {
                "lora_rank": self.rank,
                "lora_alpha": self.alpha,
                "learning_rate": self.lr,
                "gradient_clip_norm": self.max_grad_norm,
            }
        )


@dataclasses.dataclass(frozen=True)
class InstructTrainingConfig(Checked):
    """Options of the trainer: epochs, split, validation, checkpoints, learning rate and schedule.

    `learning_rate` is the peak that the schedule scales.

    Raises ConfigError, with every problem at once.
    """

    epochs: int = option("epochs", 3)
    val_split: float = option("val_split", 0.2)
    save_every: int = option("save_every", 1)
    early_stopping_patience: int = option("patience", 5)
    checkpoint_dir: str = option("checkpoint_dir", "checkpoints")
    seed: int = option("seed", 42)
    log_interval: int = option("log_every", 1)
    learning_rate: float = option("lr", 2e-4)
    warmup_fraction: float = option("warmup_fraction", 0.1)
    lr_min: float = option("lr_min", 1e-6)
    batch_size: int = option("batch_size", 4)
    schedule: str = option("schedule", "warmup-cosine")
    max_steps: int | None = option("max_steps", None)
    order: str = option("order", "shuffle")
    val_rows: int = option("val_rows", 1000)
    save_steps: int | None = option("save_steps", None)
    save_minutes: float = option("save_minutes", 10.0)
    keep: int = option("keep", 2)
    on_nonfinite: str = option("on_nonfinite", "skip")

    def contradictions(self) -> list[str]:
        return [] if self.val_split > 0 else ["--val-split must be above 0, not 0"]


@dataclasses.dataclass(frozen=True)
class InstructConfig(Checked):
    """Options of the pipeline: LoRA, optimizer, clipping.

    `learning_rate` is for calls of `train_step` and `train_batch` that name none; a trainer hands
    each step the rate of its own schedule.

    Raises ConfigError, with every problem at once.
    """

    lora_rank: int = option("rank", 16)
    lora_alpha: float = option("alpha", 32.0)
    learning_rate: float = option("lr", 2e-4)
    epochs: int = option("epochs", 3)
    max_seq_len: int = option("max_seq_len", 512)
    gradient_clip_norm: float = option("max_grad_norm", 1.0)
    targets: tuple[str, ...] = option("targets", ("q_proj", "v_proj"))
    num_layers: int | None = option("num_layers", None)
    dropout: float = option("dropout", 0.0)
    weight_decay: float = option("weight_decay", 0.01)
    seed: int = option("seed", 42)
    target_rank: tuple[str, ...] = option("target_rank", ())
    rslora: bool = option("rslora", False)
    dora: bool = option("dora", False)
    lr_ratio: float = option("lr_ratio", 1.0)
    init: str = option("init", "lora")
    init_adapter: str | None = option("init_adapter", None)

    def contradictions(self) -> list[str]:
        return super().contradictions() + lora_problems(self)
