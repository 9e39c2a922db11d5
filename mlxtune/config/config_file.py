"""Reads config files, in time and memory proportional to their size, and translates mlx-lm's.

A file is YAML or TOML. mlx_lm.lora takes such a file with --config too; the keys and defaults are
in mlx_lm/lora.py. Its entries become our options, with a line on each.
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mlxtune.config.known_names import as_flag
from mlxtune.config.limits import OPTIONS_LIMITS, TooLargeError, check_value
from mlxtune.errors import ConfigError, one_line, shorten

# The time and memory of tomllib grow with the square of the number of parts in a key.
_LONG_KEY = re.compile(
    r"""(?<![\w-])(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
    r"""(?:[ \t]*+\.[ \t]*+(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')){16}"""
)


class _Loader(yaml.SafeLoader):
    """Reads plain scalars as null, true, false, a decimal number, or else text.

    Dates, sexagesimals, hexadecimals and numbers with too many digits stay text, so that an error
    names the option. `<<` is a key like any other: merging can double a mapping with every line.
    """

    # Drop the resolvers of SafeLoader.
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Keep `<<` as an ordinary key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is given twice, of which PyYAML would keep the last."""
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    problem = f"{shorten(key.value)} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep=deep)


for _kind, _pattern, _first in (
    ("null", r"(?:~|null|)\Z", ["~", "n", "N", ""]),
    ("bool", r"(?:yes|no|true|false|on|off)\Z", list("yYnNtTfFoO")),
    ("float", r"[-+]?[0-9]{0,30}\.[0-9]{1,30}(?:e[-+]?[0-9]{1,5})?\Z", list("-+.0123456789")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]{0,29})\Z", list("-+0123456789")),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(_pattern, re.IGNORECASE), _first
    )


def read_config_file(path: Path) -> Mapping[Any, Any]:
    """Return the names and values in a YAML or TOML file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(OPTIONS_LIMITS.bytes + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([f"--config {path} cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"--config {path} cannot be read: it is not text in UTF-8"]) from error
    if len(content) > OPTIONS_LIMITS.bytes:
        size = f"{OPTIONS_LIMITS.bytes // 1024} KB"
        raise ConfigError([f"--config {path} is larger than {size}: keep only options in it"])
    values = _parse_toml(path, text) if path.suffix.lower() == ".toml" else _parse_yaml(path, text)
    try:
        check_value(values, OPTIONS_LIMITS, f"--config {path}")
    except TooLargeError as error:
        raise ConfigError([str(error)]) from error
    if values is None:  # an empty file, or a file of comments
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError([f"--config {path} must contain names and values, such as 'rank: 8'"])
    spelled = Counter(str(key).replace("-", "_") for key in values)
    if twice := [name for name, times in spelled.items() if times > 1]:
        raise ConfigError([f"--config {path}: {shorten(twice[0])} is given in two spellings"])
    return values


def _parse_toml(path: Path, text: str) -> Any:
    problem = f"--config {path} is not valid TOML"
    if long := _LONG_KEY.search(text):
        line = text.count("\n", 0, long.start()) + 1
        raise ConfigError([f"{problem}: line {line}: a key has too many dots"])
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError([f"{problem}: {one_line(error)}"]) from error
    except ValueError as error:  # int() accepts at most a few thousand digits
        raise ConfigError([f"{problem}: a number has too many digits"]) from error


def _parse_yaml(path: Path, text: str) -> Any:
    problem = f"--config {path} is not valid YAML"
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError([f"{problem}: {line}{one_line(str(error.problem))}"]) from error
    # PyYAML lets some of Python's exceptions pass: `!!bool maybe` raises KeyError.
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError) as error:
        raise ConfigError([problem]) from error
    except (AttributeError, TypeError, RecursionError) as error:
        raise ConfigError([problem]) from error


# Keys that mark a file as a config of mlx-lm. mlx-lm's other keys are also keys of mlxtune or
# of other tools.
_SIGNS = frozenset(
    (
        *("model", "iters", "lora_parameters", "lora_layers", "fine_tune_type", "adapter_path"),
        *("steps_per_report", "steps_per_eval", "val_batches", "test_batches", "mask_prompt"),
        *("resume_adapter_file", "max_seq_length", "lr_schedule", "clear_cache_threshold"),
    )
)
Options = dict[str, Any]
Entries = Mapping[str, Any]


@dataclass
class Translation:
    """Our options for the entries of a file, a line on each entry, and problems."""

    options: Options = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _UnrepresentableError(ValueError):
    """An entry that mlxtune cannot honour; the message gives the reason."""


def is_mlx_lm_file(entries: Mapping[Any, Any], own: Collection[str]) -> bool:
    """Return whether the entries are for mlx-lm; `own` has the options of all our commands."""
    names = {str(key).replace("-", "_") for key in entries}
    return bool(names & _SIGNS) and not any(name in own for name in names - _ENTRIES.keys())


def translate(entries: Mapping[Any, Any]) -> Translation:
    """Return our options for the entries of an mlx-lm file; report unknown entries as problems."""
    named = {str(key).replace("-", "_"): value for key, value in entries.items()}
    translation = Translation()
    for name, value in named.items():
        if (convert := _ENTRIES.get(name)) is None:
            translation.problems.append(f"{shorten(name)} is not an option of mlx-lm or mlxtune")
            continue
        try:
            options, why = ({}, "not set") if value is None else convert(value, named)
        except _UnrepresentableError as problem:
            translation.problems.append(f"{name}: {shorten(str(value))}: {problem}")
            continue
        translation.options |= options
        translation.lines.append(_line(name, value, options, why))
    if absent := [f"{name} ({ours})" for name, ours in _DEFAULTS.items() if name not in named]:
        translation.lines.append(
            f"not in the file, so mlxtune's default applies: {', '.join(absent)}"
        )
    return translation


def _line(name: str, value: Any, options: Options, why: str) -> str:
    flags = " ".join(
        as_flag(option, None if each is True else _text(each)) for option, each in options.items()
    )
    shown = "" if isinstance(value, Mapping) else f" {_text(value)}"
    return f"{name}:{shown} → {', '.join(filter(None, (flags, why)))}"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# Conversions: each returns options, and a remark on the entry.

_Converter = Callable[[Any, Entries], tuple[Options, str]]


def _same(option: str, why: str = "") -> _Converter:
    return lambda value, _: ({option: value}, why)


def _nothing(why: str, otherwise: str | None = None) -> _Converter:
    """Return no option, and a remark, which is `otherwise` if the entry is false."""
    return lambda value, _: ({}, why if value or otherwise is None else otherwise)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _UnrepresentableError("must be a number") from None
    if not math.isfinite(number):
        raise _UnrepresentableError("must be a finite number")
    return number


def _whole(value: Any, by: int = 1) -> int:
    return max(int(_number(value)) // by, 1)


def _accumulated(entries: Entries) -> int:
    """Return the number of mlx-lm's batches that make one of our steps."""
    return _whole(entries.get("grad_accumulation_steps") or 1)


def _fine_tune_type(value: Any, _: Entries) -> tuple[Options, str]:
    if value == "full":
        raise _UnrepresentableError("full fine-tuning is out of scope: use lora or dora")
    return ({"dora": True}, "") if value == "dora" else ({}, "what mlxtune trains")


def _training_mode(value: Any, _: Entries) -> tuple[Options, str]:
    return ({}, "what mlxtune does") if value == "normal" else ({"objective": value}, "")


def _optimizer(value: Any, entries: Entries) -> tuple[Options, str]:
    if value not in ("adam", "adamw"):
        raise _UnrepresentableError("the optimizer is always AdamW: use adam or adamw")
    decay = _settings(entries).get("weight_decay", 0.01 if value == "adamw" else 0)
    return {"weight_decay": decay}, "AdamW, with bias correction"


def _settings(entries: Entries) -> Entries:
    every = entries.get("optimizer_config")
    own = every.get(entries.get("optimizer")) if isinstance(every, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def _optimizer_config(_: Any, entries: Entries) -> tuple[Options, str]:
    left_out = [name for name in _settings(entries) if name != "weight_decay"]
    ours = "betas are 0.9, 0.999, eps is 1e-8, bias is corrected"
    return {}, f"without {', '.join(left_out)}: {ours}" if left_out else "see optimizer"


def _num_layers(value: Any, _: Entries) -> tuple[Options, str]:
    return ({"num_layers": value}, "") if _number(value) > 0 else ({}, "all layers, as in mlxtune")


def _batch_size(value: Any, entries: Entries) -> tuple[Options, str]:
    return {"batch_size": _whole(value) * _accumulated(entries)}, ""


def _iters(value: Any, entries: Entries) -> tuple[Options, str]:
    steps = _whole(value, _accumulated(entries))
    return {"max_steps": steps, "epochs": steps}, "as many passes as the steps take"


def _in_steps(option: str) -> _Converter:
    return lambda value, entries: ({option: _whole(value, _accumulated(entries))}, "")


def _learning_rate(value: Any, entries: Entries) -> tuple[Options, str]:
    if entries.get("lr_schedule"):
        return {"lr": value}, "see lr_schedule"
    return {"lr": value, "schedule": "constant"}, ""


def _lr_schedule(value: Any, entries: Entries) -> tuple[Options, str]:
    name = value.get("name") if isinstance(value, Mapping) else None
    arguments = value.get("arguments") if isinstance(value, Mapping) else None
    if name != "cosine_decay" or not isinstance(arguments, list) or len(arguments) < 2:
        raise _UnrepresentableError(
            "only cosine_decay with its arguments has a counterpart: see --schedule"
        )
    iters = _number(entries.get("iters") or arguments[1])
    warmup = min(_number(value.get("warmup") or 0) / max(iters, 1), 1.0)
    options = {
        "schedule": "warmup-cosine",
        "lr": _number(arguments[0]),
        "warmup_fraction": warmup,
        "lr_min": _number(arguments[2]) if len(arguments) > 2 else 0.0,
    }
    return options, "the rate falls over the whole run"


def _lora_parameters(value: Any, _: Entries) -> tuple[Options, str]:
    if not isinstance(value, Mapping):
        raise _UnrepresentableError("must have rank, scale and dropout")
    rank = _whole(value.get("rank", 8))
    scaled = value.get("alpha", _number(value.get("scale", 20.0)) * rank)
    keys = value.get("keys")
    options = {"rank": rank, "alpha": scaled, "targets": ["all"] if keys is None else keys}
    if _number(value.get("dropout") or 0):
        options["dropout"] = value["dropout"]
    return options, "alpha is scale times rank"


def _grad_checkpoint(value: Any, _: Entries) -> tuple[Options, str]:
    return {"grad_checkpoint": "on" if value else "auto"}, "" if value else "only if needed"


def _report_to(value: Any, _: Entries) -> tuple[Options, str]:
    names = str(value).replace(" ", "").split(",")
    ours = [name for name in names if name != "swanlab"]
    return {"track": ours}, "" if ours == names else "without swanlab, which mlxtune lacks"


def _mask_prompt(value: Any, _: Entries) -> tuple[Options, str]:
    if value:
        return {"turns": "last"}, ""
    return {}, "in mlxtune, only answers carry loss, in every turn"


def _hf_dataset(*_: Any) -> tuple[Options, str]:
    raise _UnrepresentableError("use --data owner/name:split, and --field for the columns")


_ENTRIES: Mapping[str, _Converter] = {
    "model": _same("model_path"),
    "train": _nothing("what this command does", "this command trains anyway"),
    "fine_tune_type": _fine_tune_type,
    "training_mode": _training_mode,
    "optimizer": _optimizer,
    "optimizer_config": _optimizer_config,
    "data": _same("data"),
    "seed": _same("seed"),
    "num_layers": _num_layers,
    "lora_layers": _num_layers,
    "batch_size": _batch_size,
    "grad_accumulation_steps": _nothing("in --batch-size and --max-steps"),
    "iters": _iters,
    "val_batches": _nothing("each validation covers all its rows"),
    "learning_rate": _learning_rate,
    "lr_schedule": _lr_schedule,
    "steps_per_report": _same("log_every"),
    "steps_per_eval": _in_steps("val_steps"),
    "save_every": _in_steps("save_steps"),
    "resume_adapter_file": _same("init_adapter"),
    "adapter_path": _same("output", "a folder"),
    "test": _nothing("mlxtune eval does that after the run", "nothing to do"),
    "test_batches": _nothing("mlxtune eval covers all of a test file"),
    "max_seq_length": _same("max_seq_len"),
    "grad_checkpoint": _grad_checkpoint,
    "clear_cache_threshold": _nothing("mlxtune decides that from --memory-limit"),
    "lora_parameters": _lora_parameters,
    "mask_prompt": _mask_prompt,
    "report_to": _report_to,
    "project_name": _nothing("the tracker's own setting"),
    "hf_dataset": _hf_dataset,
    "trust_remote_code": _same("trust_remote_code"),
    "config": _nothing("this file"),
}
# Our defaults for entries that a file lacks, where mlx-lm's default differs.
_DEFAULTS = {
    "iters": "--epochs 1, mlx-lm 1000",
    "learning_rate": "--lr 1e-4, mlx-lm 1e-5",
    "max_seq_length": "--max-seq-len 512, mlx-lm 2048",
    "num_layers": "all, mlx-lm 16",
    "lora_parameters": "rank 8 and alpha 16 on q_proj and v_proj, mlx-lm alpha 160 on all",
}
