"""The options of a run as frozen dataclasses, built from flags, a config file or Python.

Each field takes its bounds and help from options.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxtune.errors import ConfigError
from mlxtune.options import Checked, option


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    """Options that say which data is read and how it is encoded, split and batched.

    Raises ConfigError, with every problem at once.
    """

    model_path: str = option("model_path", "")
    data: tuple[str, ...] = option("data", ())
    max_seq_len: int = option("max_seq_len", 512)
    batch_size: int = option("batch_size", 4)
    val_split: float = option("val_split", 0.2)
    val_data: str | None = option("val_data", None)
    val_rows: int = option("val_rows", 1000)
    seed: int = option("seed", 42)
    format: str = option("format", "auto")
    field: tuple[str, ...] = option("field", ())
    template: str = option("template", "auto")
    turns: str = option("turns", "all")
    thinking: str = option("thinking", "auto")
    merge_system: bool = option("merge_system", False)
    strict: bool = option("strict", False)
    cache_dir: str | None = option("cache_dir", None)
    no_cache: bool = option("no_cache", False)
    trust_remote_code: bool = option("trust_remote_code", False)
    quiet: bool = option("quiet", False)

    def contradictions(self) -> list[str]:
        from mlxtune.core.formats import parse_fields

        try:
            parse_fields(self.field)
        except ValueError as problem:
            return [f"--field {problem}"]
        return []

    @property
    def data_paths(self) -> list[Path]:
        """The data files and folders."""
        return [_path(data) for data in self.data]

    @property
    def val_data_path(self) -> Path | None:
        """The validation file, if there is one."""
        return None if self.val_data is None else _path(self.val_data)

    @property
    def cache_path(self) -> Path | None:
        """The folder that keeps encoded data, or None for none."""
        if self.no_cache:
            return None
        if self.cache_dir is not None:
            return _path(self.cache_dir)
        return user_cache() / "encoded"


@dataclasses.dataclass(frozen=True)
class TrainConfig(DataConfig):
    """Options of one run, for the command and for `mlxtune.train`.

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
    grad_checkpoint: str = option("grad_checkpoint", "auto")
    compile: str = option("compile", "auto")
    log_every: int = option("log_every", 10)

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.schedule == "warmup-cosine" and self.lr_min > self.lr:
            problems += [
                f"--lr-min {self.lr_min:g} is above --lr {self.lr:g}: "
                "lower it or use another --schedule"
            ]
        return problems

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
class PlanConfig(TrainConfig):
    """Options of a plan: those of the run, which may be without data.

    Raises ConfigError, with every problem at once.
    """

    data: tuple[str, ...] = option(
        "data", (), "Data to plan for; without it, one example of --max-seq-len.", required=False
    )
    json: bool = option("json", False, "Print JSON for programs; docs/plan.md describes it.")


@dataclasses.dataclass(frozen=True)
class InspectConfig(DataConfig):
    """Options of a look at the data, for the command and for `mlxtune.inspect`.

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
        """The page to write, if there is to be one."""
        return None if self.html is None else _path(self.html)

    @property
    def dump_path(self) -> Path | None:
        """The file of examples to write, if there is to be one."""
        return None if self.dump is None else _path(self.dump)


@dataclasses.dataclass(frozen=True)
class BenchConfig(DataConfig):
    """Options of a benchmark of training steps. Without `against`, only this package is measured.

    Raises ConfigError, with every problem at once.
    """

    # What `train` holds out for validation would not be timed.
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
    memory_limit: float = option("memory_limit", 24.0)
    dtype: str = option("dtype", "auto")
    grad_checkpoint: str = option("grad_checkpoint", "auto")
    compile: str = option("compile", "auto")

    @property
    def json_path(self) -> Path | None:
        """The file to write, if there is to be one."""
        return None if self.json in (None, "-") else _path(str(self.json))

    def training(self, dtype: str) -> TrainConfig:
        """Return the options of the run whose steps are timed, computing in `dtype`.

        Gradients are not clipped: other trainers do not clip them by default.
        """
        names = {field.name for field in dataclasses.fields(TrainConfig)}
        shared = {name: value for name, value in vars(self).items() if name in names}
        own = {"dtype": dtype, "schedule": "constant", "max_grad_norm": 0.0}
        return TrainConfig(**shared | own)


@dataclasses.dataclass(frozen=True)
class InstructTrainingConfig(Checked):
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


# The configs of the commands.
CONFIGS: tuple[type, ...] = (TrainConfig, InspectConfig, BenchConfig, PlanConfig)


def user_cache() -> Path:
    """Return the folder of what this user's runs keep and share: encoded data, hashes, the memory
    that is reserved.
    """
    import platformdirs

    return Path(platformdirs.user_cache_path("mlxtune"))


def _path(text: str) -> Path:
    # Unlike Path.expanduser, leaves alone what is no home of anybody.
    return Path(os.path.expanduser(text))  # noqa: PTH111


def load_config_file(path: Path, config: type = TrainConfig) -> tuple[dict[str, Any], list[str]]:
    """Read options from a YAML or TOML file; keys are field names, with `-` or `_`.

    Returns the options of `config`, and a problem for each that does not exist. Those of another
    command are passed over, so that one file serves all.

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
    known = {field.name for kind in CONFIGS for field in dataclasses.fields(kind)}
    own = {field.name for field in dataclasses.fields(config)}
    options, problems = {}, []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in own:
            options[name] = value
        elif name not in known:
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
