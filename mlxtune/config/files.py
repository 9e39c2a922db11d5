"""Reads YAML and TOML config files in time and memory proportional to their size."""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mlxtune.config.limits import OPTIONS, TooLarge, check_value
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
            content = file.read(OPTIONS.bytes + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([f"--config {path} cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"--config {path} cannot be read: it is not text in UTF-8"]) from error
    if len(content) > OPTIONS.bytes:
        raise ConfigError(
            [f"--config {path} is larger than {OPTIONS.bytes // 1024} KB: keep only options in it"]
        )
    values = _parse_toml(path, text) if path.suffix.lower() == ".toml" else _parse_yaml(path, text)
    try:
        check_value(values, OPTIONS, f"--config {path}")
    except TooLarge as error:
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
