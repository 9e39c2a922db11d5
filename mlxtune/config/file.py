"""Options from a YAML or TOML file."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxtune.config.options import OPTIONS
from mlxtune.errors import ConfigError


def load_config_file(path: Path, config: type) -> tuple[dict[str, Any], list[str]]:
    """Read options from a YAML or TOML file; keys are field names, with `-` or `_`.

    Returns the options of `config`, and a problem for each unknown option. Options of other
    commands are ignored, so that one file serves all.

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
    own = {field.name for field in dataclasses.fields(config)}
    options, problems = {}, []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in own:
            options[name] = value
        elif name not in OPTIONS:
            close = difflib.get_close_matches(name, own, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            problems.append(f"--config {path} has no option {key!r}{hint}")
    return options, problems


def _parse_config_text(path: Path, text: str) -> Any:
    if path.suffix.lower() == ".toml":
        import tomllib

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
