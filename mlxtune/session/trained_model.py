"""Finds, loads and runs the base model and the adapter that a command's options name."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mlxtune.backend.adapters import attach
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.initialize import find_initial
from mlxtune.backend.device import allocator, default_device
from mlxtune.backend.models import loading
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.models.model_folder import FolderError, find_folder, is_local, read_config
from mlxtune.backend.text.chat_template import read_chat_template
from mlxtune.backend.text.generate import Answer, Generator, Sampling, Stream, seed
from mlxtune.backend.workers.shards import shard_base
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.config import (
    AnswerConfig,
    EvalConfig,
    ImportConfig,
    ObjectiveConfig,
    OutgoingConfig,
    TrainConfig,
    UseConfig,
    as_path,
)
from mlxtune.config.data_config import TEMPLATES, BaseOptions
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.held_out import RunRows
from mlxtune.core.data.prompt import Prompt
from mlxtune.core.files.remembered import is_own
from mlxtune.core.formatting import format_name
from mlxtune.core.run.checkpoint import INITIAL_HASH
from mlxtune.core.run.stored_run import get_mapping
from mlxtune.core.run.trained_rows import record_of, rows_behind, rows_in_record
from mlxtune.errors import ConfigError, DataError, ModelError, one_line
from mlxtune.session.reader import Reader, template_text
from mlxtune.session.session import model_folder
from mlxtune.views.console import RunConsole

# The metadata key that marks an adapter as trained on plain text alone.
_PLAIN_TEXT = "plain_text"
# The key of the hash of the model's own chat template, if training used it.
_CHAT_TEMPLATE = "chat_template"
# Options that shape a prompt.
_PROMPT_OPTIONS = ("template", "thinking", "merge_system")
# Options that decide which tokens of a row an evaluation scores.
READING_OPTIONS = ("max_seq_len", "cut", "field", "turns")
# The entry of the adapter's config that describes its training rows.
TRAINED_ROWS = "trained_rows"
_OBJECTIVE_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ObjectiveConfig)}

U = TypeVar("U", bound=UseConfig)
A = TypeVar("A", bound=AnswerConfig)


def await_result(console: RunConsole) -> None:
    """Make the console say that kernels are being compiled if a GPU's first result is slow."""
    if not default_device.on_cpu():
        console.await_result()


# Finding a model


def find_base(config: OutgoingConfig | UseConfig, adapter: AdapterFile) -> Path:
    """Return the base model's folder, from --model-path or else by the model's name in the adapter.

    The name may be a path relative to the folder in which the adapter's run was started.

    Raises ModelError.
    """
    return find_named_base(config, adapter, adapter.info.model, adapter.origin.working_directory)


def find_named_base(
    config: ImportConfig | OutgoingConfig | UseConfig,
    adapter: AdapterFile,
    named: str,
    relative_to: str,
) -> Path:
    """Return the base model's folder, from --model-path or else by the name `named`.

    The model's config is checked. Raises ModelError as `base_name` does.
    """
    path = base_name(config, adapter, named, relative_to)
    try:
        folder = find_folder(path)
    except FolderError as error:
        if config.model_path:
            raise
        raise ModelError(
            f"{adapter.path}: its base model {path} {error.reason}: pass --model-path"
        ) from error
    read_config(folder, trust_remote_code=config.trust_remote_code)
    return folder


def base_name(
    config: ImportConfig | OutgoingConfig | TrainConfig | UseConfig,
    adapter: AdapterFile,
    named: str,
    relative_to: str,
) -> str:
    """Return the path or name of the base model: --model-path, or else `named`.

    The name may be a path relative to `relative_to`. A model to download is accepted by this name
    only if this user made the adapter's run. Raises ModelError.
    """
    path = config.model_path or named
    if not path:
        raise ModelError(f"{adapter.path} names no base model: pass --model-path")
    with suppress(OSError, ValueError):  # not a folder name, or a folder we may not read
        if not config.model_path and relative_to and (Path(relative_to) / path).is_dir():
            path = str(Path(relative_to) / path)
    if not (config.model_path or is_local(path) or _is_own(adapter)):
        raise ModelError(
            f"{adapter.path}: its base model is not here, and you did not make the adapter on this "
            f"machine: to download the model, pass --model-path {shlex.quote(path)}"
        )
    return path


def _is_own(adapter: AdapterFile) -> bool:
    """Return whether this user made the adapter's run."""
    return (run := adapter.origin.run) is not None and is_own(run)


# Running a model with its adapter


@dataclass(frozen=True)
class LoadedModel:
    """A base model, perhaps with an adapter, which can be switched off and on."""

    base: BaseModel
    adapted: attach.AdapterSwitch | None

    def use_adapter(self, on: bool) -> None:
        if self.adapted is not None:
            self.adapted.use_adapter(on)


class UseSession(Generic[U]):
    """The base model and the adapter that the options of a command name, checked without weights.

    In this order: the adapter, the base model, the options of training that the adapter records,
    and how the base was quantised. `config` has these options, unless the user chose others; see
    `with_recorded_options`. Raises ModelError.
    """

    def __init__(
        self, config: U, console: RunConsole, explicit_options: Collection[str] = ()
    ) -> None:
        self.console = console
        self.adapter = None if config.adapter is None else AdapterFile.find(config.adapter)
        self.config = with_recorded_options(config, self.adapter, explicit_options)
        self.folder = model_folder(self.config)
        _base_options(self.config, self.adapter, self.folder)
        if self.adapter is None:
            return
        warn_of_base(self.adapter, self.folder, console)
        if self.config.template == "auto":
            warn_of_template(self.adapter, self.folder, console)

    @cached_property
    def reader(self) -> Reader:
        """The reader of prompts."""
        return Reader(self.config.reading_config(turns="last"), self.folder)

    def load(self) -> LoadedModel:
        return load_model(self.config, self.adapter, self.folder, self.console)


def with_recorded_options(
    config: U, adapter: AdapterFile | None, explicit_options: Collection[str] = ()
) -> U:
    """Return the options with the adapter's base model, prompt options and objective.

    An option takes precedence: a model and any prompt option. An evaluation also reads its rows as
    training did; its options in `explicit_options` take precedence, one by one. Raises ModelError.
    """
    if adapter is None:
        return config
    changes: dict[str, Any] = {}
    if config.model_path is None:
        changes["model_path"] = str(find_base(config, adapter))
    if isinstance(config, EvalConfig):
        changes |= _recorded_values(adapter, "prompt", set(_PROMPT_OPTIONS) - set(explicit_options))
        changes |= _recorded_values(
            adapter, "reading", set(READING_OPTIONS) - set(explicit_options)
        )
        if "objective" not in explicit_options:
            changes |= _recorded_values(
                adapter, "objective", _OBJECTIVE_DEFAULTS.keys() - explicit_options
            )
    elif not _prompt_options(config):
        changes |= _recorded_values(adapter, "prompt", _PROMPT_OPTIONS)
    try:
        return replace(config, **changes) if changes else config
    except ConfigError as error:
        raise ModelError(f"{adapter.path}: its config is damaged: {one_line(error)}") from error


def _recorded_values(adapter: AdapterFile, record: str, names: Collection[str]) -> dict[str, Any]:
    """Return the values that the adapter's config records for `names`. Raises ModelError."""
    recorded = adapter.info.mlxtune.get(record)
    options = {} if recorded is None else recorded
    if not isinstance(options, Mapping):
        raise ModelError(f"{adapter.path}: its config is damaged: {record} is not an object")
    values = {name: options[name] for name in names if name in options}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def training_record(
    config: TrainConfig, plain_text: bool, folder: Path, rows: RunRows | None = None
) -> dict[str, Any]:
    """Return the options of training, and hashes of its rows and template, for the adapter.

    `folder` is the model's. Only the model's own template is hashed: others are among the options.
    """
    own = ((name, getattr(config, name)) for name in _OBJECTIVE_DEFAULTS)
    objective = {name: value for name, value in own if value != _OBJECTIVE_DEFAULTS[name]}
    if config.is_rewarded:  # an evaluation without rewards compares losses
        objective = {}
    read = {name: getattr(config, name) for name in READING_OPTIONS}
    reading = {name: value for name, value in read.items() if value != getattr(TrainConfig, name)}
    records = {"objective": objective, _PLAIN_TEXT: plain_text, "reading": reading}
    if rows is not None:
        split = (config.val_split, config.seed, config.val_rows)
        records[TRAINED_ROWS] = record_of(rows, *split)
    if config.template == "auto" and not plain_text:
        records[_CHAT_TEMPLATE] = _hash_of_template(folder)
    return {"prompt": _prompt_options(config)} | {
        key: each for key, each in records.items() if each
    }


def _hash_of_template(folder: Path) -> str:
    """Return a hash of a model's own templates, or `none`. Raises ModelError."""
    sources = read_chat_template(folder)
    content = json.dumps(sources, sort_keys=True).encode()
    return sha256(content).hexdigest()[:32] if sources else "none"


def warn_of_base(adapter: AdapterFile, folder: Path, console: RunConsole) -> None:
    """Warn if an adapter was trained on another base model. Raises ModelError as `check_model`."""
    attach.check_model(adapter, folder)
    if (problem := attach.base_difference(adapter, folder)) is not None:
        console.warn(f"{problem}: answers and losses may differ from those in training")


def warn_of_template(adapter: AdapterFile, folder: Path, console: RunConsole) -> None:
    """Warn if the model's own template is not the one that an adapter was trained with.

    Another model may have any template, so that `warn_of_base` says enough.
    """
    trained = adapter.info.mlxtune.get(_CHAT_TEMPLATE)
    now = trained
    with suppress(ModelError):  # whoever needs the template says why it cannot be read
        now = _hash_of_template(folder)
    if trained not in (None, now) and attach.base_difference(adapter, folder) is None:
        console.warn(
            f"{folder}: its chat template has changed since {adapter.path} was trained, and "
            "prompts are rendered with it: bring back the model's files"
        )


def _prompt_options(config: UseConfig | TrainConfig) -> dict[str, Any]:
    """Return the options that shape prompts and differ from their defaults."""
    values = {name: getattr(config, name) for name in _PROMPT_OPTIONS}
    if values["template"] not in TEMPLATES:
        values["template"] = template_text(values["template"])  # the file may change
    return {name: value for name, value in values.items() if value != getattr(UseConfig, name)}


def trained_rows_of(
    adapter: AdapterFile, rows: CorpusRows, warn: Callable[[str], None]
) -> npt.NDArray[np.uint64]:
    """Return the identities of the rows that an adapter was trained on, if they are known.

    The record of its run lists them. Without the record, the adapter's own metadata has a hash,
    which finds the rows only if `rows` has exactly these. Warns if they are unknown.
    """
    trained = rows_behind(adapter.path, warn)
    if len(trained):
        return trained
    record = adapter.info.mlxtune.get(TRAINED_ROWS)
    trained = rows_in_record(rows, record)
    if not len(trained):
        number = record.get("rows") if isinstance(record, Mapping) else None
        which = f"which {number:,} rows" if isinstance(number, int) else "which rows"
        warn(
            f"{adapter.path}: without the record of its run, {which} it was trained on is unknown: "
            "evaluate it on rows that are surely new, or bring its folder checkpoints"
        )
    return trained


def initial_adapter(adapter: AdapterFile, warn: Callable[[str], None]) -> AdapterFile | None:
    """Return the adapter from which an adapter's training started, if its run names one.

    Returns None, with a warning, if the run names one that is missing or has changed.
    """
    metadata = adapter.origin.metadata
    named = get_mapping(metadata, "config").get("init_adapter")
    if not isinstance(named, str):
        return None
    path = str(Path(adapter.origin.working_directory) / as_path(named))
    return unchanged_initial(path, metadata.get(INITIAL_HASH), adapter.path, warn)


def unchanged_initial(
    named: str,
    digest: object,
    trained: Path,
    warn: Callable[[str], None],
    opened: AdapterFile | None = None,
    workers: Workers = SINGLE_PROCESS,
) -> AdapterFile | None:
    """Return the adapter from which training started, as `find_initial` finds it on all workers.

    Returns None, with a warning on the `trained` adapter, if it is missing or has changed.
    """
    adapter, state = None, "missing"
    with suppress(ModelError):
        adapter = find_initial(named, digest, opened)
        state = "unchanged"
    if "missing" not in workers.all_gather_text(state):
        return adapter
    warn(
        f"{trained}: the adapter that its training started from, {named}, is missing or has "
        "changed, so it is compared with the base model: bring it back, or name it with mlxtune "
        "eval --against"
    )
    return None


def is_trained_on_text(adapter: AdapterFile | None) -> bool:
    """Return whether the adapter, if any, was trained on plain text alone. Raises ModelError."""
    return adapter is not None and adapter.info.mlxtune.get(_PLAIN_TEXT) is True


def load_model(
    config: UseConfig,
    adapter: AdapterFile | None,
    folder: Path,
    console: RunConsole,
    workers: Workers = SINGLE_PROCESS,
) -> LoadedModel:
    """Set the memory limits, and load the model, or this worker's part of it, with its adapter.

    The adapter's base has been checked by `warn_of_base`.
    Reports each stage on the console, which then awaits a first result. Raises ModelError.
    """
    console.describe("Memory", allocator.set_limits(config.memory_limit).describe())
    base = loading.open_base(folder, config.dtype, _base_options(config, adapter, folder))
    if workers.shards_model:
        base = shard_base(base, workers.group)
    loading.read_weights(base)
    console.describe("Model", base.describe())
    await_result(console)
    if adapter is None:
        return LoadedModel(base, None)
    adapted = attach.load_adapted(base, adapter)
    console.say("Adapter", f"{adapter.path}: {adapted.describe()}")
    if config.quantize is None and base.quantize is not None:
        name = format_name(base.quantize, base.double_quant)
        console.say("Base", f"quantised to {name}, as in training")
    elif config.quantize is not None and attach.base_mismatch(adapter, base, _as_stored(config)):
        console.warn("--quantize gives a base other than the one that the adapter was trained on")
    return LoadedModel(base, adapted)


def _base_options(config: UseConfig, adapter: AdapterFile | None, folder: Path) -> BaseOptions:
    """Return options that quantise the base as `config` asks, or as in training."""
    if config.quantize is None and adapter is not None:
        return attach.base_options(adapter, folder, _as_stored(config))
    if config.quantize in (None, "none"):
        return _as_stored(config)
    return replace(_as_stored(config), quantize=config.quantize, double_quant=config.double_quant)


def _as_stored(config: UseConfig) -> BaseOptions:
    """Return options that open a base as its folder stores it."""
    return BaseOptions(trust_remote_code=config.trust_remote_code)


# Answering prompts


def check_prompt_length(prompt: Prompt, base: BaseModel, where: str) -> None:
    """Raise DataError for a prompt that is longer than the model's context.

    Without this check, a prompt of a few hundred thousand tokens would take hours and get no
    answer.
    """
    longest = base.text_config.get("max_position_embeddings")
    if isinstance(longest, int) and 0 < longest < len(prompt.ids):
        raise DataError(
            f"{where} has {len(prompt.ids):,} tokens, but the model reads at most {longest:,}: "
            "shorten it"
        )


def start_generator(session: UseSession[A], loaded: LoadedModel) -> Generator:
    if session.config.seed is not None:
        seed(session.config.seed)
    return Generator(loaded.base.model, session.reader.tokenizer, loaded.base.vocab_size)


class Answerers:
    """The base model and the adapter: one of them answers, or both alternate token by token.

    Each keeps a cache of its conversation. The key False stands for the base model, True for the
    adapter.
    """

    def __init__(self, session: UseSession[A], loaded: LoadedModel) -> None:
        self._loaded, self._sampling = loaded, session.config.part(Sampling)
        self._generators = {on: start_generator(session, loaded) for on in (False, True)}

    def answer(
        self, prompts: Mapping[bool, Prompt], should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[bool, str | Answer]]:
        """Answer the prompts: yield each model's answer in pieces of text and, last, as an Answer.

        Raises MemoryLimitError, GpuError or ModelError.
        """
        streams: dict[bool, Stream] = {
            on: self._generators[on].stream(prompt, self._sampling, should_stop)
            for on, prompt in prompts.items()
        }
        while streams:
            for on, stream in list(streams.items()):
                self._loaded.use_adapter(on)
                try:
                    yield on, next(stream)
                except StopIteration as end:
                    del streams[on]
                    yield on, end.value
