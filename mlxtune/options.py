"""Every option, once: its type, bounds and one-line help, and how values are converted and checked.

The dataclasses of config.py take their fields from here; flags, config files and the Python API
go through the same conversion.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import reprlib
import typing
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any

from mlxtune.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What values an option takes, beyond its type. `several`: the flag may be given again."""

    help: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    required: bool = False
    several: bool = False
    if_empty: str = "is empty"

    def problem(self, value: Any) -> str | None:
        """Say what is wrong with a value of the right type, or return None."""
        empty = value == () and (self.required or not self.several)
        if empty or (isinstance(value, str) and not value.strip()):
            return self.if_empty
        if self.choices:
            if value in self.choices:
                return None
            return f"must be one of {', '.join(self.choices)}, not {_bounded(value)}"
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


def _bounded(value: Any) -> str:
    """Return a value as Python writes it, but no more of it than one would read.

    Aliases of YAML make a list of billions of items out of a few lines.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    return short.repr(value)


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
            "Data to train on: .jsonl, .json, .jsonl.gz or .parquet, or a folder with train.jsonl "
            "and valid.jsonl; may be given again.",
            required=True,
            several=True,
            metavar="PATH",
            if_empty="is required",
        ),
        "trust_remote_code": Bounds(
            "Run Python code that the model's folder brings; read it first."
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
        "max_seq_len": Bounds(
            "Longest example in tokens; what is beyond is cut.", at_least=2, at_most=10**9
        ),
        "format": Bounds(
            "How a row is laid out; auto goes by each file's own rows.",
            choices=("auto", "chat", "prompt", "alpaca", "sharegpt", "text"),
        ),
        "field": Bounds(
            "Where a row has a field by another name, such as prompt=question; may be given again.",
            several=True,
            metavar="NAME=KEY",
        ),
        "template": Bounds(
            "Chat template; auto is the model's own, or one by its type where it has none.",
            choices=("auto", "qwen3", "gemma"),
        ),
        "turns": Bounds("Assistant turns that carry loss.", choices=("all", "last")),
        "thinking": Bounds(
            "Whether a template that knows thinking asks for it; auto goes by each conversation.",
            choices=("auto", "on", "off"),
        ),
        "merge_system": Bounds(
            "Put a system message into the first user turn where the template has no place for it."
        ),
        "strict": Bounds("Make a bad row an error instead of skipping it."),
        "cache_dir": Bounds("Folder that keeps encoded data; default: in the user's cache folder."),
        "no_cache": Bounds("Encode the data anew, and keep nothing."),
    },
    "Inspect": {
        "row": Bounds("Show this row only, by its number in the file.", at_least=1, metavar="N"),
        "html": Bounds("Write a page to look at in a browser.", metavar="FILE"),
        "dump": Bounds(
            "Write every example as a JSON line with its row, tokens and mask.", metavar="FILE"
        ),
    },
    "Bench": {
        "against": Bounds("Measure another trainer on the same steps.", choices=("mlx-lm",)),
        "steps": Bounds("Optimizer steps to time, the first of an epoch.", at_least=1),
        "repeats": Bounds("Times to measure each side, each in a new process.", at_least=1),
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
        "order": Bounds(
            "Which rows share a step: any with shuffle, those of about one length with length.",
            choices=("shuffle", "length"),
        ),
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
        "grad_checkpoint": Bounds(
            "Compute activations again in the backward pass, which takes time and saves memory; "
            "auto where it is needed.",
            choices=("auto", "on", "off"),
        ),
        "compile": Bounds(
            "Have MLX compile the step; auto on a GPU and not on the CPU.",
            choices=("auto", "on", "off"),
        ),
        "seed": Bounds("Seed of the split, the order, the LoRA matrices and dropout.", at_least=0),
        "save_every": Bounds("Epochs between checkpoints.", at_least=1),
        "save_steps": Bounds("Optimizer steps between checkpoints within an epoch.", at_least=1),
        "save_minutes": Bounds(
            "Minutes between checkpoints within an epoch; 0 turns these off.", at_least=0
        ),
        "keep": Bounds("Recent checkpoints to keep, beside best/.", at_least=1),
        "overwrite": Bounds("Start over where the folder holds an unfinished run."),
        "on_nonfinite": Bounds(
            "Where a loss or gradient is not finite: skip the step, and stop after 3 in a row, or "
            "stop at once.",
            choices=("skip", "stop"),
        ),
        "wait": Bounds("Wait where other runs hold the memory, instead of ending."),
        "ignore_ledger": Bounds("Train although other runs hold the memory."),
        "log_every": Bounds("Steps between progress lines when stderr is no terminal.", at_least=1),
        "json": Bounds("Print JSON for programs; docs/inspect.md describes it."),
        "quiet": Bounds("Print warnings and errors only."),
    },
}
OPTIONS = {name: bounds for section in SECTIONS.values() for name, bounds in section.items()}


def option(
    name: str, default: Any, help: str | None = None, *, required: bool | None = None
) -> Any:
    """Declare a dataclass field whose bounds are those of OPTIONS[name], as is its help by default.

    `help` is what a config says of the option where it means something else by it; `required`
    whether it asks for it, where it does not ask as others do.
    """
    bounds = OPTIONS[name]
    if required is not None:
        bounds = dataclasses.replace(bounds, required=required)
    metadata = {"option": name, "help": help or bounds.help, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """Return the command-line flag of a field: `max_seq_len` is `--max-seq-len`."""
    return "--" + name.replace("_", "-")


class Checked:
    """A dataclass that converts and checks its fields, and names all problems at once."""

    def __post_init__(self) -> None:
        problems = []
        types = field_types(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            bounds = field.metadata["bounds"]
            value = getattr(self, field.name)
            value, problem = convert(value, types[field.name], several=bounds.several)
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


def field_types(config: type) -> dict[str, Any]:
    """Return the resolved annotation of each field of a config."""
    return typing.get_type_hints(config)


def convert(value: Any, annotation: Any, *, several: bool = False) -> tuple[Any, str | None]:
    """Convert a value to a field's annotated type; with `several`, text is one item of a tuple.

    Returns the converted value and None, or None and what is wrong with it.
    """
    if isinstance(annotation, UnionType):
        if value is None:
            return None, None
        annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
    if typing.get_origin(annotation) is tuple:
        return _convert_items(value) if several else _convert_names(value)
    return _CONVERTERS[annotation](value)


def _convert_names(value: Any) -> tuple[Any, str | None]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None, f"must be names separated by commas, not {_bounded(value)}"
    stripped = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    return stripped, None


def _convert_items(value: Any) -> tuple[Any, str | None]:
    if isinstance(value, Mapping):  # in a config file, as one would write it there
        value = [f"{name}={key}" for name, key in value.items()]
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str | os.PathLike) for item in items):
        return None, f"must be text, or several texts, not {_bounded(value)}"
    return tuple(os.fspath(item) for item in items if os.fspath(item).strip()), None


def _convert_str(value: Any) -> tuple[Any, str | None]:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value), None
    return None, f"must be text, not {_bounded(value)}"


def _convert_bool(value: Any) -> tuple[Any, str | None]:
    if isinstance(value, bool):
        return value, None
    return None, f"must be true or false, not {_bounded(value)}"


def _convert_int(value: Any) -> tuple[Any, str | None]:
    problem = f"must be a whole number, not {_bounded(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None, problem
    try:
        number = int(value)
        return (number, None) if isinstance(value, str) or number == value else (None, problem)
    except (ValueError, OverflowError):
        return None, problem


def _convert_float(value: Any) -> tuple[Any, str | None]:
    problem = f"must be a number, not {_bounded(value)}"
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
