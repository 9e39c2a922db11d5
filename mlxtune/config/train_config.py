"""Options of a run, of its pipeline and of its trainer."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from mlxtune.config.data_config import BaseOptions, DataConfig, ModelConfig
from mlxtune.config.fields import (
    CheckedConfig,
    as_path,
    flag,
    former_names,
    options_of,
    reuse_option,
)
from mlxtune.config.lora_config import LoraConfig, LoraShapeConfig
from mlxtune.config.objective_config import (
    DEFAULT_RATE,
    PREFERENCE_RATE,
    ObjectiveConfig,
    RewardedConfig,
    default_learning_rate,
)
from mlxtune.config.option import EXECUTION, FILES, LENGTH, LORA, PLACES, RESULT, RUN, TRAINING
from mlxtune.errors import shorten


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(LoraShapeConfig, ModelConfig, ObjectiveConfig, DataConfig):
    """The options that `train` and `bench` share."""

    lr: float | None = TRAINING.option(
        None,
        f"Peak learning rate of AdamW; default: {DEFAULT_RATE:g}, or "
        f"{PREFERENCE_RATE:g} for preferences and rewards.",
        RESULT,
        above=0,
    )
    order: str = TRAINING.option(
        "shuffle",
        "Order of the rows: shuffle mixes all; length puts rows of similar length into a step.",
        RESULT,
        choices=("shuffle", "length"),
    )
    quantized_compute: str = RUN.option(
        "auto",
        "Multiply by quantised weights, or unpack them for each matmul; auto unpacks on the CPU, "
        "and takes the faster of the two on a GPU.",
        RESULT,
        choices=("auto", "quantized", "dequantized"),
    )
    grad_checkpoint: str = RUN.option(
        "auto",
        "Recompute activations in the backward pass, which saves memory but takes time; auto "
        "recomputes only if memory requires it.",
        EXECUTION,
        choices=("auto", "on", "off"),
    )

    @property
    def peak_rate(self) -> float:
        """The peak learning rate: `lr`, which is None only in the constructor's arguments."""
        assert self.lr is not None
        return self.lr

    def default_of(self, name: str) -> Any:
        """Return the value of an option that nobody chose; a rate depends on the objective."""
        return default_learning_rate(self.objective) if name == "lr" else super().default_of(name)

    def contradictions(self) -> Iterator[str]:
        if self.quantize == "nf4" and self.quantized_compute == "quantized":
            yield (
                "--quantized-compute quantized: MLX has no products with nf4 weights: leave it out"
            )

    def base_options(self) -> BaseOptions:
        """Return the options that concern the base model."""
        return self.part(BaseOptions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LoopConfig(CheckedConfig):
    """The options that InstructTrainingConfig and TrainConfig share."""

    max_steps: int | None = TRAINING.option(
        None,
        "Stop after this many optimizer steps; default: at the end of --epochs.",
        LENGTH,
        at_least=1,
    )
    schedule: str = TRAINING.option(
        "warmup-cosine",
        "Schedule of the learning rate.",
        RESULT,
        choices=("warmup-cosine", "linear-warmup", "constant"),
    )
    warmup_fraction: float = TRAINING.option(
        0.1, "Fraction of the steps in which the rate warms up.", RESULT, at_least=0, at_most=1
    )
    lr_min: float = TRAINING.option(
        1e-6, "Learning rate at the end of warmup-cosine.", RESULT, at_least=0
    )
    val_steps: int | None = TRAINING.option(
        None,
        "Also validate and save every N optimizer steps within an epoch; default: only at its end.",
        RESULT,
        at_least=1,
        metavar="N",
    )
    save_every: int = RUN.option(1, "Epochs between checkpoints.", EXECUTION, at_least=1)
    save_steps: int | None = RUN.option(
        None, "Optimizer steps between checkpoints within an epoch.", EXECUTION, at_least=1
    )
    save_minutes: float = RUN.option(
        10.0,
        "Minutes between checkpoints within an epoch; 0 turns these off.",
        EXECUTION,
        at_least=0,
    )
    keep: int = RUN.option(
        2, "Recent checkpoints to keep, in addition to best/.", EXECUTION, at_least=1
    )
    on_nonfinite: str = RUN.option(
        "skip",
        "If a loss or gradient is not finite, skip the step and stop after 3 in a row, or stop "
        "immediately.",
        EXECUTION,
        choices=("skip", "stop"),
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig(_LoopConfig, LoraConfig, RewardedConfig, StepConfig):
    """Options of one run, for `mlxtune train` and `mlxtune.commands.train`.

    Strings, as from flags and config files, are converted to the field's type.

    Raises ConfigError, which lists every problem.
    """

    model_path: str = reuse_option(
        StepConfig,
        "model_path",
        help="Model folder in MLX or Hugging Face layout, or owner/name to download; with "
        "--init-adapter, its base is the default.",
    )
    _: dataclasses.KW_ONLY
    output: str = FILES.option(
        "adapters.safetensors",
        "Folder of the adapter, or its .safetensors file; adapter_config.json is written next to "
        "it.",
        PLACES,
        path=True,
    )
    checkpoint_dir: str | None = FILES.option(
        None,
        "Folder of checkpoints, metrics and ledger; default: checkpoints next to --output.",
        PLACES,
        path=True,
    )
    epochs: int = TRAINING.option(1, "Passes over the training rows.", LENGTH, at_least=1)
    max_grad_norm: float = TRAINING.option(
        1.0, "Clip gradients to this L2 norm; 0 turns clipping off.", RESULT, at_least=0
    )
    patience: int = TRAINING.option(
        5,
        "Stop after this many validations in a row without a better loss, with --val-steps too.",
        RESULT,
        at_least=1,
    )
    samples: int = TRAINING.option(
        3,
        "Validation rows to answer at the end, with and without the adapter; 0 for none.",
        EXECUTION,
        at_least=0,
        at_most=1000,
    )
    parallel: str = RUN.option(
        "data",
        "What to divide among the workers of mlx.launch: the examples of each step (data), or the "
        "model's weights (tensor).",
        EXECUTION,
        metavar="data|tensor",
    )
    auto: bool = TRAINING.option(
        False,
        "Choose the other options from data, model and memory: targets, rank, rate, length, "
        "epochs, validations; print the equivalent command.",
        RESULT,
        inherited=False,
    )
    overwrite: bool = RUN.option(
        False,
        "Start over if the folder holds an unfinished run or another adapter.",
        PLACES,
        inherited=False,
    )
    other_base: bool = LORA.option(
        False, "Use an adapter that was trained on another base model.", EXECUTION, inherited=False
    )
    wait: bool = RUN.option(
        False,
        "Wait instead of failing if other runs have reserved the memory.",
        EXECUTION,
        inherited=False,
    )
    ignore_ledger: bool = RUN.option(
        False, "Train even if other runs have reserved the memory.", EXECUTION, inherited=False
    )
    allow_sleep: bool = RUN.option(
        False, "Let the machine sleep when idle, even during training.", EXECUTION, inherited=False
    )
    pause_on_battery: bool = RUN.option(
        False, "Pause between steps while the machine runs on battery.", EXECUTION, inherited=False
    )
    log_every: int = RUN.option(
        10, "Steps between progress lines when stderr is not a terminal.", PLACES, at_least=1
    )
    profile_interval: int = RUN.option(
        0, "Profile every Nth step, by phase; 0 turns profiling off.", EXECUTION, at_least=0
    )
    track: tuple[str, ...] = RUN.option(
        (),
        "Also record the run in a tracker; may be repeated.",
        EXECUTION,
        several=True,
        choices=("trackio", "tensorboard", "wandb"),
    )

    def is_resolved_later(self, name: str) -> bool:
        return name == "model_path" and self.init_adapter is not None

    def contradictions(self) -> Iterator[str]:
        yield from self._tensor_problems()
        yield from self._reward_problems()
        if self.schedule == "warmup-cosine" and self.lr_min > self.peak_rate:
            yield (
                f"--lr-min {self.lr_min:g} is above --lr {self.peak_rate:g}: "
                "lower it or use another --schedule"
            )

    def _reward_problems(self) -> Iterator[str]:
        if not self.is_rewarded:
            for field in dataclasses.fields(RewardedConfig):
                if getattr(self, field.name) != field.default:
                    yield f"{flag(field.name)} goes with --objective grpo: leave it out"
            return
        if not self.reward:
            yield "--objective grpo needs a --reward, such as json or FILE.py"
        if self.auto:
            yield "--auto does not choose the options of grpo: leave it out"
        if self.format == "text":
            yield "--format text has no prompts for grpo: leave it out"

    def _tensor_problems(self) -> Iterator[str]:
        incompatible = {
            "--dora": self.dora,
            f"--init {self.init}": self.is_pissa,
            "--quantize nf4": self.quantize == "nf4",
            "--objective grpo": self.is_rewarded,
        }
        if self.parallel.startswith("tensor:"):
            yield (
                f"--parallel {shorten(self.parallel)}: MLX cannot divide the workers of its ring "
                "into groups: give tensor, for a part of the model on each worker"
            )
        elif self.parallel not in ("data", "tensor"):
            yield f"--parallel must be data or tensor, not {shorten(self.parallel)}"
        elif self.parallel == "tensor":
            for name, is_set in incompatible.items():
                if is_set:
                    yield f"{name} does not work with --parallel tensor: leave one of them out"

    @property
    def output_path(self) -> Path:
        """The adapter's file."""
        return adapter_path(self.output)

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint folder; by default `checkpoints` next to the output."""
        return checkpoint_path(self.output, self.checkpoint_dir)

    def pipeline_config(self) -> "InstructConfig":
        """Return the options of the pipeline."""
        return self.part(InstructConfig)

    def trainer_config(self) -> "InstructTrainingConfig":
        """Return the options of the trainer."""
        return self.part(TrainerConfig, checkpoint_dir=str(self.checkpoint_path))


def adapter_path(output: str) -> Path:
    """Return the adapter file for `--output`: the file it names, or a file in the folder it names.

    A folder name may contain a dot, as in qwen3-0.6b.
    """
    path = as_path(output)
    # Unlike Path.is_file, os.path.isfile accepts a name of any length.
    is_file = path.suffix in (".safetensors", ".json") or os.path.isfile(path)  # noqa: PTH113
    return path if is_file else path / TrainConfig.output


def checkpoint_path(output: str, checkpoint_dir: str | None) -> Path:
    """Return the checkpoint folder for `--output` and `--checkpoint-dir`."""
    if checkpoint_dir is None:
        return adapter_path(output).parent / "checkpoints"
    return as_path(checkpoint_dir)


OPTIONS = options_of(TrainConfig)


@former_names(early_stopping_patience="patience", learning_rate="lr")
@dataclasses.dataclass(frozen=True)
class InstructTrainingConfig(_LoopConfig):
    """Options of the trainer: epochs, split, validation, checkpoints, learning rate and schedule.

    `lr` is the peak that the schedule scales; None takes the pipeline's rate. `log_interval` is
    accepted and ignored.

    Raises ConfigError, which lists every problem.
    """

    ignored: ClassVar = ("log_interval",)

    epochs: int = reuse_option(TrainConfig, "epochs")
    val_split: float = reuse_option(TrainConfig, "val_split", at_least=None, above=0)
    patience: int = reuse_option(TrainConfig, "patience")
    checkpoint_dir: str = reuse_option(TrainConfig, "checkpoint_dir", "checkpoints")
    seed: int = reuse_option(TrainConfig, "seed")
    log_interval: dataclasses.InitVar[object] = None
    lr: float | None = reuse_option(TrainConfig, "lr", None)
    batch_size: int = reuse_option(TrainConfig, "batch_size")
    val_rows: int = reuse_option(TrainConfig, "val_rows")
    order: str = reuse_option(TrainConfig, "order")


@dataclasses.dataclass(frozen=True)
class TrainerConfig(InstructTrainingConfig):
    """Options of a run's trainer, whose validation rows, if any, are already chosen."""

    val_split: float = reuse_option(TrainConfig, "val_split")


@former_names(
    lora_rank="rank",
    lora_alpha="alpha",
    learning_rate="lr",
    gradient_clip_norm="max_grad_norm",
)
@dataclasses.dataclass(frozen=True)
class InstructConfig(LoraConfig):
    """Options of the pipeline: LoRA, optimizer, clipping.

    `lr` is the default of `train_step` and `train_batch`, and the peak for a trainer whose config
    has none; a trainer passes the rate of its schedule to each step. `epochs` and `max_seq_len` are
    accepted and ignored.

    Raises ConfigError, which lists every problem.
    """

    ignored: ClassVar = ("epochs", "max_seq_len")

    rank: int = reuse_option(TrainConfig, "rank")
    alpha: float = reuse_option(TrainConfig, "alpha")
    lr: float = reuse_option(TrainConfig, "lr", DEFAULT_RATE)
    epochs: dataclasses.InitVar[object] = None
    max_seq_len: dataclasses.InitVar[object] = None
    max_grad_norm: float = reuse_option(TrainConfig, "max_grad_norm")
    seed: int = reuse_option(TrainConfig, "seed")
    targets: tuple[str, ...] = reuse_option(TrainConfig, "targets")
    num_layers: int | None = reuse_option(TrainConfig, "num_layers")
