"""Resolves the options of a command once, for the command line and Python alike.

Public functions take them as a config or as keywords, with rows in place of a data file.
"""

import hashlib
import inspect
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from mlxtune.config.data_config import ROW_NAMES
from mlxtune.config.fields import CheckedConfig, explicit_options, options_of
from mlxtune.core.data.cache import least_used
from mlxtune.core.data.problems import rows_folder
from mlxtune.core.data.sources.datafiles import VALIDATION
from mlxtune.core.data.sources.nulls import without_nulls
from mlxtune.core.files import ours
from mlxtune.core.files.reading import file_hash
from mlxtune.core.files.writing import make_folder, mark_used, write_file
from mlxtune.core.formatting import byte_size
from mlxtune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mlxtune.backend.adapters.adapter_file import AdapterFile
    from mlxtune.core.run.checkpoint import Checkpoint
    from mlxtune.core.run.run_folder import ResumePoint

Result = TypeVar("Result")
C = TypeVar("C", bound=CheckedConfig)
# The largest numbers of rows and of bytes to read from an iterable of unknown length.
_MAX_ROWS, _MAX_BYTES = 1_000_000, 2**30
# The name of a file of rows: the keyword, and a hash of the content.
_NAME = re.compile(r"(data|val_data)-[0-9a-f]{16}\.jsonl$")


@dataclass(frozen=True)
class ResolvedOptions(Generic[C]):
    """The options of a command, and the names of those that are given, which take precedence.

    An option is given by the caller, or by `initial`, the adapter that a run continues from.
    A run continues from the checkpoint `resume`, if any. `origin` is a checkpoint of the earlier
    run that is resumed or repeated.
    """

    config: C
    explicit_options: frozenset[str]
    initial: "AdapterFile | None" = None
    resume: "ResumePoint | None" = None
    origin: "Checkpoint | None" = None

    @classmethod
    def recorded(cls, config: C, origin: "Checkpoint", resume: "ResumePoint | None" = None) -> Self:
        """Return the options of an earlier run, which were resolved when that run started."""
        names = frozenset(options_of(type(config)))
        return cls(config, names, resume=resume, origin=origin)


def resolve_options(config: C) -> ResolvedOptions[C]:
    """Return a config as its caller gave it, completed by the adapter in `init_adapter`, if any.

    The adapter's rank, alpha, targets, layers and kind replace the defaults of these options, and
    its base model is the default of `model_path`.
    Raises ModelError if training cannot continue from the adapter.
    """
    names = explicit_options(config)
    path = getattr(config, "init_adapter", None)
    if path is None:
        return ResolvedOptions(config, names)
    # These imports load mlx, which --help must not do.
    from mlxtune.backend.adapters.adapter_file import AdapterFile
    from mlxtune.backend.adapters.initialize import with_adapter
    from mlxtune.session.trained_model import base_name

    initial = AdapterFile.find(path, "--init-adapter")
    options = with_adapter({name: getattr(config, name) for name in names}, initial)
    training: Any = config
    if not training.model_path:
        named, relative_to = initial.info.model, initial.origin.working_directory
        options["model_path"] = base_name(training, initial, named, relative_to)
    return ResolvedOptions(type(config)(**options), frozenset(options), initial)


def takes_options(
    kind: type[C],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Let a function that takes a config also take the config's fields as keywords.

    With keywords, `data` and `val_data` may be rows: dictionaries in a list, another iterable or a
    `datasets.Dataset`.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(function)
        def of_config(options: ResolvedOptions[C], *more: Any, **own: Any) -> Result:
            return function(options.config, *more, **own)

        return takes_resolved(kind)(of_config)

    return decorate


def takes_resolved(
    kind: type[C],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Let callers of a function that takes `ResolvedOptions` pass options as for `takes_options`.

    Only this package passes `ResolvedOptions` itself, to start a run with an earlier run's options.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        _, *others = inspect.signature(function).parameters.values()
        own = {other.name for other in others}

        @wraps(function)
        def call(
            config: C | ResolvedOptions[C] | None = None, *more: Any, **keywords: Any
        ) -> Result:
            passed = {name: keywords.pop(name) for name in own & keywords.keys()}
            if isinstance(config, ResolvedOptions):
                return function(config, *more, **passed, **keywords)
            resolved = resolve_options(_config_of(kind, function.__name__, config, keywords))
            return function(resolved, *more, **passed)

        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        first = inspect.Parameter("config", either, default=None, annotation=kind)
        options = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD, annotation=Any)
        signature = inspect.signature(function).replace(parameters=[first, *others, options])
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def _config_of(kind: type[C], name: str, config: C | None, options: Mapping[str, Any]) -> C:
    """Return the config that a caller of the function `name` gave, whole or as keywords."""
    if isinstance(config, str | os.PathLike):
        required = [option for option, each in options_of(kind).items() if each.required]
        keywords = ", ".join(f"{option}=…" for option in required)
        raise ConfigError([f"name the options: {name}({keywords})"])
    if config is None:
        return kind(**with_rows(options))
    if options:
        names = ", ".join(options)
        raise ConfigError([f"{names}: give all options in the config, or all as keywords"])
    return config


def with_rows(options: Mapping[str, Any]) -> dict[str, Any]:
    """Write rows to files in the user's cache, and put the paths of the files into the options.

    Files are named by a hash of their content and kept, so that a run can be resumed and verified.
    Raises DataError.
    """
    changed = dict(options)
    data = changed.get("data")
    if isinstance(data, Mapping) and "train" in data and _is_rows(data["train"]):
        # A dictionary of splits, such as datasets.load_dataset returns.
        validation = next((data[name] for name in VALIDATION if name in data), None)
        changed["data"] = data["train"]
        if validation is not None:
            changed.setdefault("val_data", validation)
    for name in ("data", "val_data"):
        if _is_columns(changed.get(name)):
            raise DataError(
                f"{name} has columns, not rows: pass [dict(zip({name}, row)) for row in "
                f"zip(*{name}.values())]"
            )
        if _is_row(changed.get(name)):
            raise DataError(f"{name} is one row: put it in a list, {name}=[{{…}}]")
        if (rows := _table_rows(changed.get(name))) is not None:
            changed[name] = rows
        if _is_rows(changed.get(name)):
            # The value may be readable only once, with or without a length.
            if isinstance(changed[name], io.IOBase):
                raise DataError(f"{name} is an open file: pass its path")
            try:
                values = iter(changed[name])
            except TypeError as error:
                raise DataError(f"{name} has no rows: {error}") from error
            if hasattr(changed[name], "features"):  # a datasets.Dataset, whose rows are Arrow's
                values = (without_nulls(row, from_arrow=True) for row in values)
            first = list(islice(values, 1))
            every = chain(first, values)
            if isinstance(next(iter(first), {}), str | os.PathLike):
                changed[name] = list(every)
            else:
                changed[name] = str(_save_rows(every, name, _length(changed[name])))
    return changed


def _is_row(value: Any) -> bool:
    """Return whether a value is one row, not a dictionary of paths and weights."""
    own = (value[name] for name in ROW_NAMES if name in value) if isinstance(value, Mapping) else ()
    return any(not isinstance(each, int | float) for each in own)


def _is_columns(value: Any) -> bool:
    """Return whether a value is a dictionary of columns; a row's lists hold messages."""
    lists = list(value.values()) if isinstance(value, Mapping) else []
    return bool(lists) and all(
        isinstance(each, list | tuple) and each and not isinstance(each[0], Mapping)
        for each in lists
    )


def _table_rows(value: Any) -> Any:
    """Return the rows of a DataFrame of polars or pandas; None for other values."""
    if hasattr(value, "to_dicts"):
        return value.to_dicts()
    return value.to_dict("records") if hasattr(value, "itertuples") else None


def _length(rows: Any) -> int | None:
    """Return the number of rows; None if it is unknown."""
    with suppress(TypeError, ValueError):  # a progress bar around a generator has no length
        return len(rows)
    return None


def _is_rows(value: Any) -> bool:
    """Return whether a value may be rows, not a path or a dictionary of paths and weights."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | os.PathLike | dict)


def _save_rows(rows: Iterable[Any], name: str, length: int | None) -> Path:
    lines = list(_json_lines(rows, name, length))
    if not lines:
        raise DataError(f"{name} has no rows")
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    content = digest.hexdigest()
    path = rows_folder() / f"{name}-{content[:16]}.jsonl"
    if path.is_file() and file_hash(path) == content:
        mark_used(path)
    else:
        make_folder(path.parent)
        write_file(path, lines, private=True)
        _prune(path)
    return path


def _prune(keep: Path) -> None:
    """Evict the least recently used files of rows, but not `keep`."""
    with suppress(OSError):  # another process removed a file
        files = [(file.stat(), file) for file in keep.parent.iterdir() if _NAME.match(file.name)]
        for each in least_used([(at.st_mtime, file, at.st_size) for at, file in files], keep):
            ours.remove_file(each)


def _json_lines(rows: Iterable[Any], name: str, length: int | None) -> Iterator[bytes]:
    size = 0
    for number, row in enumerate(rows, start=1):
        if length is not None and number > length:
            raise DataError(f"{name} has more rows than its length, {length:,}")
        if length is None and (number > _MAX_ROWS or size > _MAX_BYTES):
            raise DataError(
                f"{name} has no end after {number - 1:,} rows ({byte_size(size)}): end the "
                "iterable (itertools.islice), or write its rows to a file and name the file"
            )
        if not isinstance(row, Mapping):
            raise DataError(
                f"{name}: row {number} is not a dictionary: {row!r:.60}: make it one, such as "
                '{"prompt": "…", "completion": "…"}'
            )
        try:
            # In tables, None and NaN are missing values.
            present = {key: value for key, value in row.items() if not _is_missing(value)}
            line = json.dumps(present, ensure_ascii=False, default=_python_value).encode() + b"\n"
            size += len(line)
            yield line
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{name}: row {number} is not JSON: {error}") from error


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _python_value(value: Any) -> Any:
    """Return a numpy number as a Python number, and a numpy array as a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it has a value of type {type(value).__name__}")
