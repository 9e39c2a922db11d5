"""Every option of a run, once: its type, default, bounds and one-line help.

The command's flags, a run's saved config and the Python API all derive from these dataclasses.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import os
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from mlxtune.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What values an option takes, beyond its type."""

    help: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    required: bool = False
    if_empty: str = "is empty"

    def problem(self, value: Any) -> str | None:
        """Say what is wrong with a value of the right type, or return None."""
        if value == () or (isinstance(value, str) and not value.strip()):
            return self.if_empty
        if self.choices:
            if value in self.choices:
                return None
            return f"must be one of {', '.join(self.choices)}, not {value!r}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number, not {value}"
        limits = (
            (self.at_least, "at least", operator.ge),
            (self.at_most, "at most", operator.le),
            (self.above, "above", operator.gt),
            (self.below, "below", operator.lt),
        )
        for limit, name, holds in limits:
            if limit is not None and not holds(value, limit):
                return f"must be {name} {limit:g}, not {_shown(value)}"
        return None


def _shown(value: float) -> str:
    # Python refuses to print an integer of thousands of digits.
    huge = isinstance(value, int) and value.bit_length() > 64
    return ("a negative number" if value < 0 else "such a large number") if huge else str(value)


# One entry for each option, in the order of --help, shared by the classes below where they mean
# the same thing.
SECTIONS: dict[str, dict[str, Bounds]] = {
    "Files": {
        "model_path": Bounds(
            "Model folder in MLX or Hugging Face layout, or owner/name to download.",
            required=True,
            if_empty="is required",
        ),
        "data": Bounds(
            'Chat data: JSON lines of {"messages": [{"role": …, "content": …}, …]}.',
            required=True,
            if_empty="is required",
        ),
        "output": Bounds(
            "Adapter file to write; adapter_config.json is written beside it.",
            if_empty="is empty: name the adapter file to write",
        ),
        "checkpoint_dir": Bounds(
            "Folder of checkpoints, metrics and ledger; default: checkpoints beside --output."
        ),
    },
    "Data": {
        "val_split": Bounds(
            "Share of the rows held out for validation, up to 0.5; 0 turns validation off.",
            at_least=0,
            at_most=0.5,
        ),
        "val_data": Bounds("Validation file, used instead of --val-split."),
        "val_rows": Bounds("Hold out at most so many rows; the others train.", at_least=1),
        "max_seq_len": Bounds("Longest example in tokens; what is beyond is cut.", at_least=2),
        "template": Bounds(
            "Chat template; auto chooses by the model's type.", choices=("auto", "qwen3", "gemma")
        ),
        "strict": Bounds("Make a bad row an error instead of skipping it."),
    },
    "LoRA": {
        "rank": Bounds("Rank of the LoRA matrices.", at_least=1),
        "alpha": Bounds("LoRA alpha; the update is scaled by alpha / rank.", above=0),
        "targets": Bounds(
            "Projections that get LoRA, by name (q_proj) or path (self_attn.q_proj), or 'all'.",
            metavar="NAME,NAME",
            if_empty="is empty: name projections such as q_proj,v_proj, or 'all'",
        ),
        "num_layers": Bounds("Apply LoRA to the last N layers only; default: all.", at_least=1),
        "dropout": Bounds("Dropout on the input of the LoRA matrices.", at_least=0, below=1),
    },
    "Training": {
        "epochs": Bounds("Passes over the training rows.", at_least=1),
        "max_steps": Bounds("Stop after so many optimizer steps.", at_least=1),
        "batch_size": Bounds("Rows in an optimizer step.", at_least=1),
        "lr": Bounds("Peak learning rate of AdamW.", above=0),
        "schedule": Bounds(
            "Learning rate over the run.", choices=("warmup-cosine", "linear-warmup", "constant")
        ),
        "warmup_fraction": Bounds("Share of the steps that warm up.", at_least=0, at_most=1),
        "lr_min": Bounds("Learning rate at the end of warmup-cosine.", at_least=0),
        "weight_decay": Bounds("AdamW weight decay.", at_least=0),
        "max_grad_norm": Bounds(
            "Clip gradients to this L2 norm; 0 turns clipping off.", at_least=0
        ),
        "patience": Bounds(
            "Stop after so many epochs without a better validation loss.", at_least=1
        ),
    },
    "Run": {
        "memory_limit": Bounds(
            "Memory that MLX may use, in GB (10^9 bytes).", above=0, at_most=1e6
        ),
        "dtype": Bounds(
            "Compute dtype; auto is the model's own on a GPU and float32 on the CPU.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        "seed": Bounds("Seed of the split, the order, the LoRA matrices and dropout.", at_least=0),
        "save_every": Bounds("Epochs between checkpoints.", at_least=1),
        "log_every": Bounds("Steps between progress lines when stderr is no terminal.", at_least=1),
        "quiet": Bounds("Print warnings and errors only."),
    },
}
OPTIONS = {name: bounds for section in SECTIONS.values() for name, bounds in section.items()}


def option(name: str, default: Any) -> Any:
    """Declare a dataclass field whose bounds and help are those of OPTIONS[name]."""
    return dataclasses.field(default=default, metadata={"option": name})


def flag(name: str) -> str:
    """Return the command-line flag of a field: `max_seq_len` is `--max-seq-len`."""
    return "--" + name.replace("_", "-")


class _Checked:
    """A dataclass that converts and checks its fields, and names all problems at once."""

    def __post_init__(self) -> None:
        problems = []
        types = field_types(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            bounds = OPTIONS[field.metadata["option"]]
            value, problem = convert(getattr(self, field.name), types[field.name])
            if problem is None and value is not None:
                problem = bounds.problem(value)
            if problem is not None:
                problems.append(f"{flag(field.name)} {problem}")
            else:
                object.__setattr__(self, field.name, value)
        if not problems:
            problems = self.contradictions()
        if problems:
            raise ConfigError(problems)

    def contradictions(self) -> list[str]:
        """Problems between fields that are each right by themselves."""
        return []


@dataclasses.dataclass(frozen=True)
class TrainConfig(_Checked):
    """Options of one run, for the command and for `mlxtune.train`.

    Strings are converted to a field's type, so that values may come from flags and config files
    alike.

    Raises ConfigError, with every problem at once.
    """

    model_path: str = option("model_path", "")
    data: str = option("data", "")
    output: str = option("output", "adapters.safetensors")
    rank: int = option("rank", 8)
    alpha: float = option("alpha", 16.0)
    lr: float = option("lr", 1e-4)
    epochs: int = option("epochs", 1)
    max_seq_len: int = option("max_seq_len", 512)
    targets: tuple[str, ...] = option("targets", ("q_proj", "v_proj"))
    memory_limit: float = option("memory_limit", 24.0)
    batch_size: int = option("batch_size", 4)
    val_split: float = option("val_split", 0.2)
    val_data: str | None = option("val_data", None)
    val_rows: int = option("val_rows", 1000)
    schedule: str = option("schedule", "warmup-cosine")
    warmup_fraction: float = option("warmup_fraction", 0.1)
    lr_min: float = option("lr_min", 1e-6)
    weight_decay: float = option("weight_decay", 0.01)
    max_grad_norm: float = option("max_grad_norm", 1.0)
    patience: int = option("patience", 5)
    save_every: int = option("save_every", 1)
    checkpoint_dir: str | None = option("checkpoint_dir", None)
    seed: int = option("seed", 42)
    num_layers: int | None = option("num_layers", None)
    dropout: float = option("dropout", 0.0)
    max_steps: int | None = option("max_steps", None)
    dtype: str = option("dtype", "auto")
    template: str = option("template", "auto")
    strict: bool = option("strict", False)
    log_every: int = option("log_every", 10)
    quiet: bool = option("quiet", False)

    def contradictions(self) -> list[str]:
        if self.schedule == "warmup-cosine" and self.lr_min > self.lr:
            return [
                f"--lr-min {self.lr_min:g} is above --lr {self.lr:g}: "
                "lower it or use another --schedule"
            ]
        return []

    @property
    def output_path(self) -> Path:
        """The adapter file to write."""
        return _path(self.output)

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint folder; by default `checkpoints` beside the output."""
        if self.checkpoint_dir is None:
            return self.output_path.parent / "checkpoints"
        return _path(self.checkpoint_dir)

    @property
    def data_path(self) -> Path:
        """The data file."""
        return _path(self.data)

    @property
    def val_data_path(self) -> Path | None:
        """The validation file, if there is one."""
        return None if self.val_data is None else _path(self.val_data)

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
class InstructTrainingConfig(_Checked):
    """Options of the trainer: epochs, split, validation, checkpoints, schedule.

    Raises ConfigError, with every problem at once.
    """

    epochs: int = option("epochs", 3)
    val_split: float = option("val_split", 0.2)
    save_every: int = option("save_every", 1)
    early_stopping_patience: int = option("patience", 5)
    checkpoint_dir: str = option("checkpoint_dir", "checkpoints")
    seed: int = option("seed", 42)
    log_interval: int = option("log_every", 1)
    warmup_fraction: float = option("warmup_fraction", 0.1)
    lr_min: float = option("lr_min", 1e-6)
    batch_size: int = option("batch_size", 4)
    schedule: str = option("schedule", "warmup-cosine")
    max_steps: int | None = option("max_steps", None)
    val_rows: int = option("val_rows", 1000)

    def contradictions(self) -> list[str]:
        return [] if self.val_split > 0 else ["--val-split must be above 0, not 0"]


@dataclasses.dataclass(frozen=True)
class InstructConfig(_Checked):
    """Options of the pipeline: LoRA, optimizer, clipping.

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


def field_types(config: type) -> dict[str, Any]:
    """Return the resolved annotation of each field of a config."""
    return typing.get_type_hints(config)


def _path(text: str) -> Path:
    # Unlike Path.expanduser, leaves alone what is no home of anybody.
    return Path(os.path.expanduser(text))  # noqa: PTH111


def convert(value: Any, annotation: Any) -> tuple[Any, str | None]:
    """Convert a value to a field's annotated type.

    Returns the converted value and None, or None and what is wrong with it.
    """
    if isinstance(annotation, UnionType):
        if value is None:
            return None, None
        annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
    if typing.get_origin(annotation) is tuple:
        return _convert_names(value)
    return _CONVERTERS[annotation](value)


def _convert_names(value: Any) -> tuple[Any, str | None]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None, f"must be names separated by commas, not {value!r}"
    stripped = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    return stripped, None


def _convert_str(value: Any) -> tuple[Any, str | None]:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value), None
    return None, f"must be text, not {value!r}"


def _convert_bool(value: Any) -> tuple[Any, str | None]:
    if isinstance(value, bool):
        return value, None
    return None, f"must be true or false, not {value!r}"


def _convert_int(value: Any) -> tuple[Any, str | None]:
    problem = f"must be a whole number, not {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None, problem
    try:
        number = int(value)
        return (number, None) if isinstance(value, str) or number == value else (None, problem)
    except (ValueError, OverflowError):
        return None, problem


def _convert_float(value: Any) -> tuple[Any, str | None]:
    problem = f"must be a number, not {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None, problem
    try:
        return float(value), None
    except (ValueError, OverflowError):
        return None, problem


_CONVERTERS: dict[Any, Callable[[Any], tuple[Any, str | None]]] = {
    str: _convert_str,
    bool: _convert_bool,
    int: _convert_int,
    float: _convert_float,
}


def load_config_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read options from a YAML or TOML file; keys are field names, with `-` or `_`.

    Returns the options and a problem for each that does not exist.

    Raises ConfigError when the file cannot be read.
    """
    try:
        content = _parse_config_text(path, path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"--config {path} cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"--config {path} cannot be read: it is not text in UTF-8"]) from error
    if content is None:  # an empty file, or one of comments
        return {}, []
    if not isinstance(content, Mapping):
        raise ConfigError([f"--config {path} must hold names and values, such as 'rank: 8'"])
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    options, problems = {}, []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in known:
            options[name] = value
        else:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            problems.append(f"--config {path} has no option {key!r}{hint}")
    return options, problems


def _parse_config_text(path: Path, text: str) -> Any:
    if path.suffix.lower() == ".toml":
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError([f"--config {path} is not valid TOML: {error}"]) from error
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError([f"--config {path} is not valid YAML: {line}{error.problem}"]) from error
    except (yaml.YAMLError, AttributeError, RecursionError, ValueError) as error:
        raise ConfigError([f"--config {path} is not valid YAML"]) from error
