"""Encodes data files with a model's tokenizer and template, and keeps what it encodes."""

import datetime
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import NoReturn

from mlxtune.backend.models.model_folder import read_config, vocab_size
from mlxtune.backend.text.chat_template import (
    ChatTemplate,
    read_chat_template,
    read_template_file,
    start_process,
)
from mlxtune.backend.text.tokenizer import ModelTokenizer, load_tokenizer
from mlxtune.config import OPTIONS, as_path
from mlxtune.config.data_config import ReadingConfig, is_jinja
from mlxtune.core.data import findings
from mlxtune.core.data.cache import cache_key, encode_file
from mlxtune.core.data.conversation import Conversation, Row
from mlxtune.core.data.encode import EncodedRows, Encoder
from mlxtune.core.data.encoded_file import EncodedFile
from mlxtune.core.data.model_template import ModelTemplate
from mlxtune.core.data.near_copies import TextHash
from mlxtune.core.data.problems import (
    NO_END_OF_TURN,
    UNKNOWN_END,
    BadRowError,
    RowTally,
    SkippedRows,
)
from mlxtune.core.data.prompt import Prompt, TurnEnds, answered, prompt_of
from mlxtune.core.data.sources.recognition import read_rows
from mlxtune.core.data.template import END_OF_TURN, PLAIN, TEMPLATES, built_in_jinja
from mlxtune.core.files.reading import file_hash
from mlxtune.errors import DataError, ModelError
from mlxtune.views import run_text
from mlxtune.views.console import RunConsole

# Folders whose code decides the contents of an encoded file.
_ENCODING_CODE = ("core/data", "backend/text")


class Reader:
    """Reads data files with a model's tokenizer and template, which are loaded on first use.

    `on_rows` is called with a file's path and the number of rows encoded so far.
    """

    def __init__(
        self,
        config: ReadingConfig,
        folder: Path,
        on_rows: Callable[[Path, int], None] = lambda path, rows: None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._on_rows = on_rows
        self._encoded: dict[Path, EncodedFile] = {}

    def with_options(self, config: ReadingConfig) -> "Reader":
        """Return a reader with other options, which shares the tokenizer. Raises ModelError."""
        reader = Reader(config, self._folder)
        reader.tokenizer = self.tokenizer
        return reader

    @cached_property
    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer. Raises ModelError."""
        config = self._config
        return load_tokenizer(
            self._folder, trust_remote_code=config.trust_remote_code, cache=config.cache_path
        )

    @cached_property
    def text_hash(self) -> TextHash:
        """A hash by which near copies of rows are found."""
        return TextHash(lambda: self.tokenizer)

    @cached_property
    def encoder(self) -> Encoder:
        if self.template_source:
            start_process()
        config, tokenizer = self._config, self.tokenizer
        if not self.template_source:
            if (built_in := self._built_in) is None:
                return Encoder(self._refuse_conversation, tokenizer)
            render, end = TEMPLATES[built_in], END_OF_TURN[built_in]
            is_token = _is_token(tokenizer, end)
            always = {} if is_token else {NO_END_OF_TURN: f"{end}: use {self._fitting_templates()}"}
            return Encoder(
                lambda row: render(row, self._turns),
                tokenizer,
                always,
                trains_prompts=config.orpo_nll == "prompt",
            )
        chat_template = ChatTemplate(self.template_source, tokenizer.special_tokens)
        template = ModelTemplate(
            chat_template,
            tokenizer.end_tokens,
            "\n".join(self.template_source.values()),
            turns=self._turns,
            thinking=config.thinking,
            merge_system=config.merge_system,
        )
        prompts = config.orpo_nll == "prompt"
        return Encoder(
            template,
            tokenizer,
            start=template.start,
            template_text=template.template_text,
            trains_prompts=prompts,
        )

    @property
    def _turns(self) -> str:
        """The assistant turns that carry loss; the last one stands for sampled answers."""
        return "last" if self._config.is_rewarded else self._config.turns

    @cached_property
    def template_source(self) -> dict[str, str]:
        """The templates of the model or of a file, by name; empty for a built-in template."""
        template = self._config.template
        if template == "auto":
            return read_chat_template(self._folder)
        if template == PLAIN:
            return {"default": built_in_jinja(PLAIN)}
        return {} if template in TEMPLATES else {"default": template_text(template)}

    @cached_property
    def _built_in(self) -> str | None:
        """Return the given template's name, or the name of the model type's built-in template.

        Returns None if there is no such template.
        """
        if self._config.template != "auto":
            return self._config.template
        trust = self._config.trust_remote_code
        model_type = read_config(self._folder, trust_remote_code=trust)["model_type"]
        families = {"qwen": "qwen3", "gemma": "gemma"}
        return next((each for name, each in families.items() if model_type.startswith(name)), None)

    @property
    def written_template(self) -> str | None:
        """The Jinja text of the template; None if the template is the model's own or is missing."""
        if self._config.template == "auto" and self.template_source:
            return None
        if (named := self.template_source.get("default")) is not None:
            return named
        return None if self._built_in is None else built_in_jinja(self._built_in)

    @property
    def adds_template(self) -> bool:
        """Whether the options name a template for a model that has none."""
        try:
            return self._config.template != "auto" and not read_chat_template(self._folder)
        except ModelError:  # the model has a template, but it cannot be read
            return False

    @property
    def has_template(self) -> bool:
        """Whether there is a template for conversations: the model's own or another."""
        return bool(self.template_source) or self._built_in is not None

    @cached_property
    def _turn_end(self) -> Prompt | None:
        """A short prompt with the template's end of an answer, or None if it has no end."""
        row = {"messages": [{"role": "user", "content": "Hi"}]}
        with suppress(DataError, ModelError):
            return prompt_of(self.encoder, row, str(self._folder)) if self.has_template else None
        return None

    @property
    def renders_prompts(self) -> bool:
        """Whether the template, if any, renders a prompt of one user turn."""
        return self._turn_end is not None

    @property
    def turn_ends(self) -> TurnEnds:
        """What may end a turn."""
        tokenizer, text = self.tokenizer, "" if self._turn_end is None else self._turn_end.end_text
        return TurnEnds(
            tokenizer.control_ids | tokenizer.eos_ids, text.rstrip(), tokenizer.token_bytes
        )

    @property
    def unknown_end(self) -> int | None:
        """The token that ends turns in the template, if it is not one of the model's end tokens."""
        end = None if self._turn_end is None else self._turn_end.end
        return None if end in self.tokenizer.eos_ids else end

    @property
    def unknown_end_note(self) -> dict[str, str]:
        """A note on an end-of-turn token that other tools don't recognise, with the remedies."""
        if (end := self.unknown_end) is None:
            return {}
        written = self.tokenizer.token_bytes([end])[0].decode(errors="replace")
        remedies = (
            f"mlx_lm.generate --extra-eos-token '{written}'",
            f"generate(eos_token_id={end}) of PEFT's model",
            f"llama.cpp --override-kv tokenizer.ggml.eos_token_id=int:{end} for a GGUF",
        )
        return {UNKNOWN_END: f"{written}: {', '.join(remedies)}"}

    def require_template(self) -> None:
        """Raise ModelError if conversations cannot be rendered."""
        if not self.has_template:
            raise ModelError(
                f"{self._folder} has no chat template for messages: complete plain text with "
                f"mlxtune generate --prompt alone, or use {self._fitting_templates()}"
            )

    def warn_of_thinking(self, thinking: str, console: RunConsole) -> None:
        """Warn if the template ignores the given --thinking."""
        source = "".join(self.template_source.values())
        for finding in findings.thinking_findings(source, thinking):
            console.warn(run_text.finding_line(finding))

    def _refuse_conversation(self, row: Conversation) -> NoReturn:
        raise ModelError(
            f"{self._folder} has no chat template, like most base models: use its Instruct "
            f"version or {self._fitting_templates()}, or train on plain text with --format text"
        )

    def _fitting_templates(self) -> str:
        """Return --template options for templates that end turns with a token of the tokenizer."""
        tokenizer = self.tokenizer
        first = {end: name for name, end in reversed(END_OF_TURN.items())}
        fitting = [name for end, name in reversed(first.items()) if _is_token(tokenizer, end)]
        ends = f" that ends answers with {tokenizer.end_tokens[0]}" if tokenizer.end_tokens else ""
        # Other tools stop at the tokenizer's own end token alone.
        own = any(END_OF_TURN[name] in tokenizer.end_tokens for name in fitting)
        plain = [PLAIN] if tokenizer.end_tokens and not own else []
        named = [*plain, *fitting, f"FILE.jinja{ends}"]
        return " or ".join(f"--template {name}" for name in named)

    def describe(self) -> str:
        named = self._config.template != "auto"
        if self._config.template == PLAIN:
            return f"built-in {PLAIN}"
        if self.template_source:
            return "from a file" if named else "the model's own"
        if self._built_in is None:
            return "none, for plain text"
        return f"built-in {self._built_in}{'' if named else ', as the model has none'}"

    def encode(self, path: Path) -> EncodedFile:
        """Encode a file unless it is cached. Raises DataError, ModelError or OutputError."""
        if path not in self._encoded:
            self._encoded[path] = self._encode(path)
        return self._encoded[path]

    def _encode(self, path: Path) -> EncodedFile:
        def encode(skipped: SkippedRows, notes: RowTally) -> Iterator[EncodedRows]:
            self._on_rows(path, 0)
            always = {**self.encoder.notes, **self.unknown_end_note}
            encoder = replace(self.encoder, notes=always)
            return encoder.encode(self.rows(path, skipped), skipped, notes)

        return encode_file(
            path,
            encode,
            cache=self._config.cache_path,
            key=self._key(path),
            on_rows=partial(self._on_rows, path),
        )

    def why_skipped(self, path: Path, row: int) -> BadRowError | None:
        """Return the reason for skipping a row; None if the row is kept, or does not exist."""
        unread = SkippedRows(path, places_per_kind=sys.maxsize)
        same = [each for each in self.rows(path, unread) if each.row == row]
        file = encode_file(
            path,
            lambda skipped, notes: self.encoder.encode(same, skipped, notes),
            cache=None,
            key="",
        )
        truncated = file.truncate(self._config.max_seq_len, at=self._config.cut)
        return (unread.problems | truncated.skipped.problems).get(row)

    def rows(self, path: Path, skipped: SkippedRows) -> Iterator[Row]:
        """Yield the readable rows of a file; count the other rows in `skipped`."""
        config = self._config
        rows = read_rows(
            path,
            skipped,
            format=config.format,
            fields=config.fields,
            objective=config.objective,
            split_at=config.split_at,
        )
        return answered(rows, skipped) if config.is_rewarded else rows

    def _key(self, path: Path) -> str:
        config = self._config
        if config.no_cache:
            return ""
        options = [name for name, option in OPTIONS.items() if option.encodes]
        dated = any("strftime_now" in source for source in self.template_source.values())
        try:
            return cache_key(
                {
                    "data": file_hash(path),
                    "options": {name: getattr(config, name) for name in options},
                    "model": self._model_hashes,
                    "template": "" if config.template == "auto" else self.template_source,
                    "date": str(datetime.date.today()) if dated else "",
                    "code": _code_hashes(),
                }
            )
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def vocab_size(self) -> int:
        """The vocabulary size in the model's config.json; 0 if the file gives none."""
        return vocab_size(self._folder)

    @cached_property
    def _model_hashes(self) -> dict[str, str]:
        return {
            str(file.relative_to(self._folder)): file_hash(file)
            for file in sorted([*self._folder.iterdir(), *self._folder.glob("*/*.jinja")])
            if file.is_file()
            and file.suffix in (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
        }


def _is_token(tokenizer: ModelTokenizer, text: str) -> bool:
    return len(tokenizer.encode_batch([text])[0].ids) == 1


def template_text(template: str) -> str:
    """Return the text of a template, given as a path or as text. Raises ModelError."""
    return template if is_jinja(template) else read_template_file(as_path(template))


@cache  # the running code does not change
def _code_hashes() -> dict[str, str]:
    """Return hashes and versions of the code that decides how data is encoded."""
    package = Path(__file__).resolve().parents[1]
    files = [file for folder in _ENCODING_CODE for file in sorted((package / folder).rglob("*.py"))]
    libraries = ("transformers", "tokenizers", "jinja2", "sentencepiece", "mlx-lm")
    return {str(file.relative_to(package).with_suffix("")): file_hash(file) for file in files} | {
        library: importlib.metadata.version(library) for library in libraries
    }
