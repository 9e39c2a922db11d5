"""Options as keywords of the public functions, and rows from Python in place of a data file."""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from mlxtune.config import user_cache
from mlxtune.config.fields import Checked
from mlxtune.core.files.files import make_folder, write_file
from mlxtune.errors import ConfigError, DataError

Result = TypeVar("Result")
# Rows from Python are kept here, by their content, so that a run can be resumed and verified.
_FOLDER = "rows"
_VALIDATION = ("validation", "valid", "val")


def takes_options(
    kind: type[Checked],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Let a function whose first argument is a config take the config's fields as keywords too.

    With keywords, `data` and `val_data` may be rows: dictionaries in a list, another iterable or a
    `datasets.Dataset`.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        first, *others = inspect.signature(function).parameters.values()
        own = {each.name for each in others}

        @wraps(function)
        def call(config: Any = None, /, *more: Any, **given: Any) -> Result:
            passed = {name: given.pop(name) for name in own & given.keys()}
            if config is None:
                config = kind(**with_rows(given))
            elif given:
                names = ", ".join(given)
                raise ConfigError([f"{names}: give all options in the config, or all as keywords"])
            return function(config, *more, **passed)

        options = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD, annotation=Any)
        optional = first.replace(default=None)
        signature = inspect.signature(function).replace(parameters=[optional, *others, options])
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def with_rows(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which rows are files in the user's cache. Raises DataError."""
    changed = dict(options)
    data = changed.get("data")
    if isinstance(data, Mapping) and "train" in data and _is_rows(data["train"]):
        # Several splits, as datasets.load_dataset returns them.
        validation = next((data[name] for name in _VALIDATION if name in data), None)
        changed["data"] = data["train"]
        if validation is not None:
            changed.setdefault("val_data", validation)
    for name in ("data", "val_data"):
        if _is_rows(changed.get(name)):
            found = iter(changed[name])
            start = next(found, None)
            every = [] if start is None else chain([start], found)
            if start is None or isinstance(start, Mapping):
                changed[name] = str(_saved(every, name))
            else:
                changed[name] = list(every)
    return changed


def _is_rows(value: Any) -> bool:
    """Return whether a value may hold rows, as opposed to one path or weights of paths."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | os.PathLike | dict)


def _saved(rows: Iterable[Any], name: str) -> Path:
    lines = list(_lines(rows, name))
    if not lines:
        raise DataError(f"{name}: has no rows")
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    path = user_cache() / _FOLDER / f"{digest.hexdigest()[:16]}.jsonl"
    if not path.exists():
        make_folder(path.parent)
        write_file(path, lines)
    return path


def _lines(rows: Iterable[Any], name: str) -> Iterator[bytes]:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(f"{name}: row {number} is no dictionary: {row!r:.60}")
        try:
            # In a table of columns, None is a missing value.
            present = {key: value for key, value in row.items() if value is not None}
            yield json.dumps(present, ensure_ascii=False, default=_plain).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{name}: row {number} is not JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Return a number of numpy, or an array, as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it has a {type(value).__name__}")
