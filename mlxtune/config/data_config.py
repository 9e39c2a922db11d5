"""Options of the model, of reading data and of `inspect`, and the names of a row's fields."""

import dataclasses
import difflib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

from mlxtune.config.fields import CheckedConfig, as_path
from mlxtune.config.objective_config import RowObjectiveConfig
from mlxtune.config.option import (
    COMMAND,
    DATA,
    EXECUTION,
    FILES,
    INPUT,
    INSPECT,
    PLACES,
    RESULT,
    RUN,
    TRAINING,
)
from mlxtune.errors import ConfigError, shorten

_MAX_WEIGHT = 1000
ROW_NAMES = (
    *("messages", "tools", "prompt", "completion", "instruction", "input", "output"),
    *("system", "history", "conversations", "text", "chosen", "rejected", "label"),
)
MESSAGE_NAMES = ("role", "content", "from", "value")
FIELD_NAMES = (*ROW_NAMES, *MESSAGE_NAMES)
# Fields by the names that other tools give them.
_FIELD_SYNONYMS = {
    **dict.fromkeys(("context", "passage", "document"), "input"),
    **dict.fromkeys(("question", "query", "user"), "prompt"),
    **dict.fromkeys(("answer", "response", "assistant"), "completion"),
}
TEMPLATES = ("auto", "chatml", "qwen3", "gemma", "plain")
FORMATS = ("4", "8", "mxfp4", "nvfp4", "mxfp8", "nf4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """How to open a base model: whether to trust its code, and how to store and multiply weights.

    `quantize`, a format of --quantize, quantises the weights of a full-precision model one by one
    as they are read; `double_quant` is for nf4. `quantized_compute` is a form of
    --quantized-compute.
    """

    trust_remote_code: bool = False
    quantize: str | None = None
    double_quant: bool = False
    quantized_compute: str = "auto"

    @property
    def as_stored(self) -> Self:
        """The same options for a base that is not quantised while loading."""
        return dataclasses.replace(self, quantize=None, double_quant=False)


# The options of a model whose weights stay in their format, and whose code is not run.
AS_STORED = BaseOptions()


@dataclasses.dataclass(frozen=True)
class _ModelOptions(CheckedConfig):
    """The model folder, and the format of its prompts."""

    model_path: str = FILES.option(
        "",
        "Model folder in MLX or Hugging Face layout, or owner/name to download.",
        INPUT,
        path=True,
        required=True,
    )
    _: dataclasses.KW_ONLY
    trust_remote_code: bool = FILES.option(
        False,
        "Run Python code from the model's folder; read that code first.",
        EXECUTION,
        encodes=True,  # the code may define another tokenizer
        inherited=False,
    )
    template: str = DATA.option(
        "auto",
        "Chat template: auto (the model's own, else the built-in one for its type), a built-in "
        "(chatml, qwen3, gemma; plain ends answers with the model's own end token), or the path of "
        "a Jinja file.",
        RESULT,
        encodes=True,
        metavar="auto|chatml|qwen3|gemma|plain|FILE.jinja",
    )
    thinking: str = DATA.option(
        "auto",
        "Turn thinking on or off in the template; auto follows each conversation.",
        RESULT,
        encodes=True,
        choices=("auto", "on", "off"),
    )
    merge_system: bool = DATA.option(
        False,
        "Merge a system message into the first user turn if the template has no system role.",
        RESULT,
        encodes=True,
    )
    quiet: bool = RUN.option(False, "Print warnings and errors only.", PLACES)

    def contradictions(self) -> Iterator[str]:
        template, exists = self.template, self.template in TEMPLATES or is_jinja(self.template)
        if not exists and not template.endswith(".jinja"):
            yield (
                f"--template must be one of {', '.join(TEMPLATES)} or FILE.jinja, "
                f"not {shorten(template)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(_ModelOptions):
    """The base model, its precision, and the memory that it may use."""

    memory_limit: float = RUN.option(
        24.0,
        "Memory that MLX may use, in GB (10^9 bytes); capped at what the device can give.",
        EXECUTION,
        above=0,
        at_most=1e6,
    )
    dtype: str = RUN.option(
        "auto",
        "Compute dtype; auto is the model's own on a GPU and float32 on the CPU.",
        RESULT,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantize: str | None = RUN.option(
        None,
        "Quantise the frozen weights to an MLX format or QLoRA's nf4 while loading.",
        RESULT,
        choices=FORMATS,
    )
    double_quant: bool = RUN.option(False, "Also quantise the scales of nf4, to 8 bits.", RESULT)

    def contradictions(self) -> Iterator[str]:
        if self.double_quant and self.quantize != "nf4":
            yield "--double-quant goes with --quantize nf4: leave it out, or set both"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsConfig(RowObjectiveConfig):
    """Options for reading and encoding rows."""

    max_seq_len: int = DATA.option(
        512, "Length in tokens to which a longer example is cut.", RESULT, at_least=2, at_most=10**9
    )
    cut: str = DATA.option(
        "end",
        "Where to cut a longer example: at its end, or at its start to keep the last answer.",
        RESULT,
        choices=("end", "start"),
    )
    format: str = DATA.option(
        "auto",
        "Layout of a row; auto detects it for each file.",
        RESULT,
        encodes=True,
        choices=("auto", "chat", "prompt", "alpaca", "sharegpt", "text", "chatgpt", "gemini"),
    )
    split_at: str | None = DATA.option(
        None,
        "With --format text, make a row of each part of a .txt or .md file; default: a row of each "
        "file.",
        RESULT,
        encodes=True,
        choices=("heading", "paragraph"),
    )
    field: tuple[str, ...] = DATA.option(
        (),
        "Key of a field in the file, such as prompt=question; may be repeated.",
        RESULT,
        encodes=True,
        several=True,
        metavar="NAME=KEY",
    )
    turns: str = DATA.option(
        "all", "Assistant turns that carry loss.", RESULT, encodes=True, choices=("all", "last")
    )
    strict: bool = DATA.option(False, "Make a bad row an error instead of skipping it.", RESULT)
    cache_dir: str | None = DATA.option(
        None,
        "Folder that caches encoded data; default: the user's cache folder.",
        PLACES,
        path=True,
        inherited=False,
    )
    no_cache: bool = DATA.option(False, "Encode the data again, and cache nothing.", PLACES)

    @cached_property
    def fields(self) -> Mapping[str, str]:
        """The keys of fields in the files, by field, as `parse_fields` gives them."""
        return parse_fields(self.field)

    @property
    def cache_path(self) -> Path | None:
        if self.no_cache:
            return None
        return user_cache() / "encoded" if self.cache_dir is None else as_path(self.cache_dir)

    def contradictions(self) -> Iterator[str]:
        if self.split_at is not None and self.format != "text":
            yield "--split-at is for plain text: add --format text"
        yield from field_problems(self.field)
        if self.objective != "sft" and self.format != "auto":
            yield f"--format {self.format} goes with --objective sft: leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingConfig(RowsConfig, _ModelOptions):
    """How rows and prompts are read with a model's tokenizer and template."""


@dataclasses.dataclass(frozen=True)
class DataConfig(ReadingConfig):
    """The data, and how it is encoded, split and batched."""

    data: tuple[str, ...] = FILES.option(
        (),
        "Data to train on: .jsonl, .json, .csv or .tsv (also .gz), or .parquet; a folder with "
        "train.jsonl and valid.jsonl; or owner/name[/config][@revision][:split] on "
        "Hugging Face; may be repeated. a.jsonl=2 uses each row twice per epoch.",
        INPUT,
        path=True,
        required=True,
        several=True,
    )
    _: dataclasses.KW_ONLY
    val_split: float = DATA.option(
        0.2,
        "Fraction of the rows held out for validation, up to 0.5; 0 turns validation off.",
        RESULT,
        at_least=0,
        at_most=0.5,
    )
    val_data: str | None = DATA.option(
        None,
        "Validation file, or owner/name:split on Hugging Face, used instead of --val-split.",
        INPUT,
        path=True,
    )
    val_rows: int = DATA.option(
        1000, "Maximum number of rows to hold out; all others are trained on.", RESULT, at_least=1
    )
    batch_size: int = TRAINING.option(4, "Rows per optimizer step.", RESULT, at_least=1)
    seed: int = RUN.option(
        42, "Seed of the split, the order, the LoRA matrices and dropout.", RESULT, at_least=0
    )

    def contradictions(self) -> Iterator[str]:
        for value in self.data:
            if not 0 < weighted(value)[1] <= _MAX_WEIGHT:
                bounds = f"above 0 and at most {_MAX_WEIGHT}"
                yield f"--data {value}: the weight must be a number {bounds}"


@dataclasses.dataclass(frozen=True)
class InspectConfig(DataConfig):
    """Options of `mlxtune inspect`. Raises ConfigError, which lists every problem."""

    row: int | None = INSPECT.option(
        None, "Show only this row, by its number in the file.", COMMAND, at_least=1
    )
    html: str | None = INSPECT.option(None, "Write an HTML page.", COMMAND, path=True)
    dump: str | None = INSPECT.option(
        None,
        "Write every example as a JSON line with its row, tokens and mask.",
        COMMAND,
        path=True,
    )
    json: bool = RUN.option(
        False, "Print JSON for programs; docs/inspect.md describes it.", COMMAND
    )

    def contradictions(self) -> Iterator[str]:
        files = [as_path(path).resolve() for path in (self.html, self.dump) if path is not None]
        if len(files) > len(set(files)):
            yield "--html and --dump name the same file: choose another for one of them"


def is_jinja(template: str) -> bool:
    """Return whether a value of --template is a template's text, as adapters record it."""
    return "{%" in template or "{{" in template


def field_problems(pairs: Sequence[str]) -> Iterator[str]:
    """Yield the problem of the first invalid pair in --field."""
    try:
        parse_fields(pairs)
    except ValueError as problem:
        yield f"--field {problem}"


def parse_fields(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `name=key` pairs: a field's name, and the key that the file uses for it.

    In `label=`, the empty key means that a file's label is a class, which nothing reads. Raises
    ValueError with a sentence on the first invalid pair.
    """
    fields: dict[str, str] = {}
    for pair in pairs:
        name, equals, key = pair.partition("=")
        if not equals or not (key or name == "label"):
            raise ValueError(f"{shorten(pair)} is not a pair such as prompt=question")
        if name not in FIELD_NAMES:
            close = _FIELD_SYNONYMS.get(name) or "".join(
                difflib.get_close_matches(name, FIELD_NAMES, 1)
            )
            hint = f", did you mean {close}?" if close else ""
            raise ValueError(
                f"{shorten(name)} is not a field{hint} (known: {', '.join(FIELD_NAMES)})"
            )
        if name in fields:
            raise ValueError(
                f"{name} is given twice, as {shorten(fields[name])} and {shorten(key)}"
            )
        fields[name] = key
    return fields


def weighted(value: str) -> tuple[str, float]:
    """Return a value of --data without its weight, and the weight, by default 1.

    A number after the last `=` is the weight, unless the whole value is an existing path. Other
    text after an existing path and `=` is a weight of NaN.
    """
    name, _, weight = value.rpartition("=")
    if not name or os.path.lexists(as_path(value)):
        return value, 1.0
    try:
        return name, float(weight)
    except ValueError:
        return (name, math.nan) if os.path.lexists(as_path(name)) else (value, 1.0)


def user_cache() -> Path:
    """Return this user's cache folder, which holds encoded data, hashes and reservations.

    Raises ConfigError if the user has no home folder.
    """
    import platformdirs

    try:
        return Path(platformdirs.user_cache_path("mlxtune"))
    except RuntimeError as error:
        raise ConfigError(["this user has no home folder: set HOME or XDG_CACHE_HOME"]) from error
