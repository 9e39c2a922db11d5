"""The models of a server: a base model, loaded once, and adapters that take turns on it."""

import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer as load_with_mlx_lm

from mlxtune.backend.adapters import attach
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.adapter_folder import find_adapter
from mlxtune.backend.lora.targets import PROJECTIONS
from mlxtune.backend.models.token_array import TokenArrays
from mlxtune.config import ServeConfig, UseConfig, as_path
from mlxtune.config.data_config import BaseOptions, ReadingConfig
from mlxtune.core.data.encode import Encoder, Encoding, Tokenizer
from mlxtune.core.data.prompt import Prompt, prompt_of, text_prompt
from mlxtune.core.run.checkpoint import ADAPTER, MANIFEST, checkpoint_folders
from mlxtune.core.run.stored_run import get_mapping
from mlxtune.errors import ConfigError, DataError, ModelError
from mlxtune.session import trained_model
from mlxtune.session.reader import Reader
from mlxtune.session.trained_model import UseSession
from mlxtune.views.console import RunConsole

BASE = "base"
_REQUEST = "the request"
# The argument or option that gives an adapter's path, for errors.
_OPTION = "PATH"
# The characters of a long text that are counted at a time, and how many tokens more than in the
# whole text these may have at their edges.
_SLICE, _EDGES = 2**15, 32


@dataclass(frozen=True)
class ServedModel:
    """The base model, or an adapter as its file was when it was opened; `version` tells them apart.

    `session` has the options with which prompts are read: for an adapter, those of its training.
    """

    name: str
    version: str
    session: UseSession[UseConfig]


class ServedModels:
    """A base model and the adapters that a server's options name.

    An adapter that changes on disk is opened again by `current`. `switch_to` must always be called
    by the same thread, which also runs the model. Raises ConfigError or ModelError, for example for
    an adapter that was trained on another base model.
    """

    def __init__(self, config: ServeConfig, console: RunConsole) -> None:
        self._config, self._console = config, console
        self._paths, self._numbers = _paths_by_name(config), count(1)
        self._lock = threading.RLock()
        # Encoding may take seconds, in which `token_bytes` and `current` must not wait.
        self._encoding = threading.Lock()
        self._readers: dict[ReadingConfig, tuple[Reader, TokenizerWrapper]] = {}
        self._attached: dict[str, tuple[str, attach.AdapterSwitch]] = {}
        self._models: dict[str, ServedModel] = {}
        # The first adapter decides which base model is loaded, and how it is quantised.
        first = self._session(next(iter(self._paths), BASE))
        self.folder = first.folder
        for name in (BASE, *self._paths):
            self._models[name] = self._open(name)
        self._load(first)

    def _load(self, first: UseSession[UseConfig]) -> None:
        loaded = first.load()
        self.base = base = loaded.base
        loaded.use_adapter(False)
        base.model.eval()
        named = base.model.named_modules()
        self._plain = [(path, each) for path, each in named if isinstance(each, PROJECTIONS)]
        mx.eval(base.model.parameters())
        self._ids = TokenArrays(base.model)
        options = BaseOptions(trust_remote_code=self._config.trust_remote_code)
        for model in self._models.values():
            if (adapter := model.session.adapter) is None:
                continue
            if self._config.quantize is None and (
                problem := attach.base_mismatch(adapter, base, options)
            ):
                raise ModelError(f"{problem}, or serve it apart")
            # Attach each adapter once, so that a broken one is found before the first request.
            self.switch_to(model)
        self.switch_to(self._models[BASE])

    def _session(self, name: str, folder: Path | None = None) -> UseSession[UseConfig]:
        places = {} if folder is None else {"model_path": str(folder)}
        if path := self._paths.get(name):
            file = AdapterFile.find(str(_find(path)), _OPTION)
            places["adapter"] = str(file.path)
        return UseSession(self._config.part(UseConfig, **places), self._console)

    def _open(self, name: str) -> ServedModel:
        """Return the model `name` as it is on disk. Raises ModelError."""
        session = self._session(name, self.folder)
        if (adapter := session.adapter) is not None:
            attach.check_model(adapter, self.folder)
            if problem := attach.base_difference(adapter, self.folder):
                raise ModelError(f"{name}: {problem}: serve it apart, or leave it out")
        return ServedModel(name, f"{name} {next(self._numbers)}", session)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    def current(self, name: str) -> ServedModel | None:
        """Return the model `name`, opened again if its file changed; None if there is none.

        Raises ModelError if the changed file cannot be served.
        """
        with self._lock:
            if (model := self._models.get(name)) is None:
                return None
            adapter = model.session.adapter
            # A run in training may have another checkpoint.
            if adapter is not None and (
                _find(self._paths[name]) != adapter.path or adapter.has_changed
            ):
                model = self._models[name] = self._open(name)
            return model

    # Prompts

    def _reading(
        self, model: ServedModel, thinking: object = None
    ) -> tuple[Reader, TokenizerWrapper]:
        """Return the reader of a model's prompts, and mlx-lm's tokenizer with the same end tokens.

        Models with the same options share them.
        """
        options = model.session.config.reading_config(turns="last")
        if isinstance(thinking, bool):
            options = replace(options, thinking="on" if thinking else "off")
        if (cached := self._readers.get(options)) is None:
            reader = Reader(options, self.folder)
            cached = self._readers[options] = (reader, _tokenizer_of(reader, self.folder, options))
        return cached

    def tokenizer(self, model: ServedModel) -> TokenizerWrapper:
        with self._lock:
            return self._reading(model)[1]

    def token_bytes(self, model: ServedModel, token: int) -> bytes:
        """Return the bytes of a token."""
        with self._lock:
            return self._reading(model)[0].tokenizer.token_bytes([token])[0]

    def prompt(self, model: ServedModel, content: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a conversation, as in training, or with the request's own options.

        Raises DataError or ModelError.
        """
        options = content.get("chat_template_kwargs") or {}
        with self._lock:
            reader, _ = self._reading(model, options.get("enable_thinking"))
        if not reader.has_template:
            raise DataError(
                f"{model.name} has no chat template for messages: ask it at /v1/completions"
            )
        source = "".join(reader.template_source.values())
        if content.get("tools") and source and "tools" not in source:
            raise DataError(f"the chat template of {model.name} leaves out tools: ask without them")
        with self._encoding:
            return self._fitting(prompt_of(self._encoder(reader), content, _REQUEST))

    def text_prompt(self, model: ServedModel, text: str) -> Prompt:
        """Return the prompt of plain text to complete. Raises DataError or ModelError."""
        with self._lock:
            reader, _ = self._reading(model)
        with self._encoding:
            return self._fitting(text_prompt(self._encoder(reader), text, _REQUEST))

    def _encoder(self, reader: Reader) -> Encoder:
        """Return a reader's encoder, which refuses texts that the model cannot read."""
        longest = self.base.text_config.get("max_position_embeddings")
        if not isinstance(longest, int) or longest <= 0:
            return reader.encoder
        return replace(reader.encoder, tokenizer=_BoundedTokenizer(reader.tokenizer, longest))

    def _fitting(self, prompt: Prompt) -> Prompt:
        """Return a prompt that the model can read. Raises DataError or ModelError for another."""
        self._ids.check(prompt.ids)
        trained_model.check_prompt_length(prompt, self.base, _REQUEST)
        return prompt

    # The adapters on the base model

    def switch_to(self, model: ServedModel) -> None:
        """Attach a model's adapter to the base model in place of the current adapter.

        Raises ModelError. No model can then run before the next switch, which removes what is left.
        """
        network = self.base.model
        network.update_modules(tree_unflatten(self._plain))
        if (adapter := model.session.adapter) is None:
            return
        version, adapted = self._attached.pop(model.name, ("", None))
        if adapted is None or version != model.version:
            adapted = attach.load_adapted(self.base, adapter)
            mx.eval(network.trainable_parameters())
        adapted.use_adapter(True)
        self._attached[model.name] = (model.version, adapted)


@dataclass(frozen=True)
class _BoundedTokenizer:
    """A tokenizer that refuses texts of more than `longest` tokens before it encodes all of them.

    Raises DataError.
    """

    tokenizer: Tokenizer
    longest: int

    @property
    def bos_id(self) -> int | None:
        return self.tokenizer.bos_id

    @property
    def eos_id(self) -> int | None:
        return self.tokenizer.eos_id

    @property
    def control_tokens(self) -> Sequence[str]:
        return self.tokenizer.control_tokens

    @property
    def control_ids(self) -> frozenset[int]:
        return self.tokenizer.control_ids

    def token_bytes(self, ids: Sequence[int]) -> Sequence[bytes]:
        return self.tokenizer.token_bytes(ids)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Encoding]:
        for text in texts:
            self._check(text)
        return self.tokenizer.encode_batch(texts)

    def _check(self, text: str) -> None:
        if len(text) <= self.longest:
            return
        count = 0
        for start in range(0, len(text), _SLICE):
            (encoded,) = self.tokenizer.encode_batch([text[start : start + _SLICE]])
            count += len(encoded.ids) - _EDGES
            if count > self.longest:
                raise DataError(
                    f"{_REQUEST} has more tokens than the {self.longest:,} that the model reads: "
                    "shorten it"
                )


def _paths_by_name(config: ServeConfig) -> dict[str, str]:
    """Return the path of each adapter by its name. Raises ConfigError."""
    named = [(_name_of(path), path) for path in config.adapters]
    for each in config.name:
        name, _, path = each.partition("=")
        named.append((name.strip(), path.strip()))
    names = [name for name, _ in named]
    if BASE in names:
        path = shlex.quote(dict(named)[BASE])
        raise ConfigError([f"the name {BASE} is the base model's own: pass --name OTHER={path}"])
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError([f"two models are named {name}: pass --name NAME=PATH" for name in twice])
    return dict(named)


def _find(path: str) -> Path:
    """Return the adapter file at a path; in a run with no best checkpoint yet, the newest one's.

    Raises ModelError.
    """
    try:
        return find_adapter(path, _OPTION)
    except ModelError:
        named = as_path(path)
        with suppress(OSError):
            folders = [*checkpoint_folders(named), *checkpoint_folders(named / "checkpoints")]
            if folders:
                newest = max(folders, key=lambda each: (each / MANIFEST).stat().st_mtime_ns)
                return newest / ADAPTER
        raise


def _name_of(path: str) -> str:
    """Return the name of an adapter's folder, or of its run's folder."""
    folder = as_path(path).resolve()
    folder = folder.parent if folder.suffix == ".safetensors" else folder
    return (folder.parent if folder.name == "checkpoints" else folder).name or BASE


def _tokenizer_of(reader: Reader, folder: Path, options: ReadingConfig) -> TokenizerWrapper:
    """Return mlx-lm's tokenizer, which takes rendered prompts and ends answers as `reader` does."""
    own, end = reader.tokenizer, reader.unknown_end
    loaded: TokenizerWrapper = load_with_mlx_lm(
        folder, tokenizer_config_extra={"trust_remote_code": options.trust_remote_code}
    )
    loaded.eos_token_ids = own.eos_ids | ({end} - {None})
    loaded.has_chat_template = True
    loaded.apply_chat_template = _ids_of
    return loaded


class RenderedMessages(list[Any]):
    """The messages of a request, with the prompt that the run's template makes of them."""

    def __init__(self, messages: Sequence[Any], prompt: Prompt) -> None:
        super().__init__(messages)
        self.prompt = prompt


def _ids_of(messages: list[Any], **options: Any) -> list[int]:
    """Return the tokens of rendered messages; for the first messages alone, no tokens."""
    # mlx-lm renders the system message apart, to cache it on its own; the prompt cache finds the
    # same tokens without that.
    return list(messages.prompt.ids) if isinstance(messages, RenderedMessages) else []


def trained_on(adapter: AdapterFile | None) -> dict[str, Any]:
    """Return an adapter's training facts, without paths."""
    if adapter is None:
        return {}
    metadata = adapter.origin.metadata
    data = get_mapping(metadata, "config").get("data")
    facts = {
        "model": Path(adapter.info.model).name,
        "data": [Path(str(each)).name for each in data] if isinstance(data, list) else None,
        "rows": get_mapping(adapter.info.mlxtune, trained_model.TRAINED_ROWS).get("rows"),
        "steps": metadata.get("step"),
        "val_loss": metadata.get("val_loss"),
    }
    return {key: value for key, value in facts.items() if value not in (None, "")}
