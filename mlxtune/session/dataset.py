"""Reads data files into examples, for every command that needs data."""

import datetime
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mlxtune.backend.models.model_folder import read_config, vocab_size
from mlxtune.backend.text.chat_template import (
    ChatTemplate,
    read_chat_template,
    read_template_file,
    start_process,
)
from mlxtune.backend.text.tokenizer import ModelTokenizer, load_tokenizer
from mlxtune.config import OPTIONS, DataConfig, InspectConfig, as_path
from mlxtune.config.data_config import is_jinja, parse_fields
from mlxtune.core.data import findings
from mlxtune.core.data.cache import encode_file, key_of
from mlxtune.core.data.conversation import Conversation
from mlxtune.core.data.corpus import Corpus, TextHash
from mlxtune.core.data.encode import EncodedRows, Encoder, Row
from mlxtune.core.data.encoded_file import EncodedFile, ExampleArrays
from mlxtune.core.data.findings import Finding
from mlxtune.core.data.formats import read_rows
from mlxtune.core.data.held_out import RunRows
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.data.model_template import ModelTemplate
from mlxtune.core.data.problems import (
    NO_END_OF_TURN,
    UNKNOWN_END,
    BadRow,
    RowTally,
    SkippedRows,
    shown,
)
from mlxtune.core.data.prompt import Prompt, TurnEnds, prompt_of
from mlxtune.core.data.sources.datafiles import DataFiles, find_data_files
from mlxtune.core.data.sources.text_rows import encoding_of, is_text_file
from mlxtune.core.data.template import END_OF_TURN, PLAIN, TEMPLATES, built_in_jinja
from mlxtune.core.files.reading import file_hash
from mlxtune.core.formatting import pluralise
from mlxtune.errors import DataError, ModelError
from mlxtune.hub.dataset_download import HubData, fetch
from mlxtune.hub.dataset_name import DataValue, data_value
from mlxtune.views import run_text
from mlxtune.views.console import RunConsole

# Folders whose code decides the contents of an encoded file.
_ENCODING_CODE = ("core/data", "backend/text")
Config = TypeVar("Config", bound=DataConfig)


@dataclass(frozen=True)
class Dataset:
    """The training and validation data of a run, with ledgers that account for every row.

    `files` and `ledgers` list the training files, then the validation files. `hub` describes each
    data set that was downloaded. `template_added` says whether the options give a template to a
    model that has none.
    """

    template: str
    template_added: bool
    rows: RunRows
    files: list[EncodedFile]
    ledgers: list[Ledger]
    findings: list[Finding]
    hub: list[dict[str, Any]]

    @property
    def corpus(self) -> Corpus:
        """All rows of the training files, held-out rows included."""
        return self.rows.train.corpus

    @property
    def plain_text(self) -> bool:
        """Whether all rows are plain text, to which no template applies."""
        return all(file.arrays.plain_text for file in self.files)


class Reader:
    """Reads data files with a model's tokenizer and template, which are loaded on first use.

    `on_rows` is called with a file's path and the number of rows encoded so far.
    """

    def __init__(
        self,
        config: DataConfig,
        folder: Path,
        on_rows: Callable[[Path, int], None] = lambda path, rows: None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._on_rows = on_rows
        self._encoded: dict[Path, EncodedFile] = {}

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
                return Encoder(self._refuse, tokenizer)
            render, end = TEMPLATES[built_in], END_OF_TURN[built_in]
            known = _is_token(tokenizer, end)
            always = {} if known else {NO_END_OF_TURN: f"{end}: use {self._fitting()}"}
            return Encoder(
                lambda row: render(row, config.turns),
                tokenizer,
                always,
                trains_prompts=config.orpo_nll == "prompt",
            )
        chat_template = ChatTemplate(self.template_source, tokenizer.special_tokens)
        template = ModelTemplate(
            chat_template,
            tokenizer.end_tokens,
            "\n".join(self.template_source.values()),
            turns=config.turns,
            thinking=config.thinking,
            merge_system=config.merge_system,
        )
        prompts = config.orpo_nll == "prompt"
        return Encoder(
            template,
            tokenizer,
            start=template.start,
            source=template.source,
            trains_prompts=prompts,
        )

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
        """Return the given template's name, or else that of the model type's built-in template.

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
        """A short prompt, with the end that the template gives its answer; None without one."""
        asked = {"messages": [{"role": "user", "content": "Hi"}]}
        with suppress(DataError, ModelError):
            return prompt_of(self.encoder, asked, str(self._folder)) if self.has_template else None
        return None

    @property
    def turn_ends(self) -> TurnEnds:
        """What may end a turn."""
        tokenizer, text = self.tokenizer, "" if self._turn_end is None else self._turn_end.end_text
        return TurnEnds(tokenizer.control_ids | tokenizer.eos_ids, text.rstrip(), tokenizer.spell)

    @property
    def unknown_end(self) -> int | None:
        """The token that ends turns in the template, if it is not one of the model's end tokens."""
        end = None if self._turn_end is None else self._turn_end.end
        return None if end in self.tokenizer.eos_ids else end

    @property
    def unknown_end_note(self) -> dict[str, str]:
        """A note on conversations whose end of turn other tools do not know, with the remedies."""
        if (end := self.unknown_end) is None:
            return {}
        written = self.tokenizer.spell([end])[0].decode(errors="replace")
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
                f"mlxtune generate --prompt alone, or use {self._fitting()}"
            )

    def warn_of_thinking(self, thinking: str, console: RunConsole) -> None:
        """Warn if the template ignores the given --thinking."""
        source = "".join(self.template_source.values())
        for finding in findings.thinking_findings(source, thinking):
            console.warn(run_text.finding_line(finding))

    def _refuse(self, row: Conversation) -> NoReturn:
        raise ModelError(
            f"{self._folder} has no chat template, like most base models: use its Instruct "
            f"version or {self._fitting()}, or train on plain text with --format text"
        )

    def _fitting(self) -> str:
        """Return --template options for templates that end turns with a token of the tokenizer."""
        tokenizer = self.tokenizer
        first = {end: name for name, end in reversed(END_OF_TURN.items())}
        known = [name for end, name in reversed(first.items()) if _is_token(tokenizer, end)]
        ends = f" that ends answers with {tokenizer.end_tokens[0]}" if tokenizer.end_tokens else ""
        # Other tools stop at the tokenizer's own end token alone.
        own = any(END_OF_TURN[name] in tokenizer.end_tokens for name in known)
        plain = [PLAIN] if tokenizer.end_tokens and not own else []
        named = [*plain, *known, f"FILE.jinja{ends}"]
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
        file = self._encoded[path]
        # Cutting the examples adds to the file's tallies, and --auto cuts them twice.
        return replace(file, skipped=deepcopy(file.skipped), notes=deepcopy(file.notes))

    def _encode(self, path: Path) -> EncodedFile:
        def encode(skipped: SkippedRows, notes: RowTally) -> Iterator[EncodedRows]:
            done = 0
            self._on_rows(path, done)
            always = {**self.encoder.notes, **self.unknown_end_note}
            encoder = replace(self.encoder, notes=always)
            for rows in encoder.encode(self.rows(path, skipped), skipped, notes):
                yield rows
                done += len(rows)
                self._on_rows(path, done)

        return encode_file(path, encode, cache=self._config.cache_path, key=self._key(path))

    def why_skipped(self, path: Path, row: int) -> BadRow | None:
        """Return the reason for skipping a row; None if the row is kept, or does not exist."""
        unread = SkippedRows(path, places_per_kind=sys.maxsize)
        same = [each for each in self.rows(path, unread) if each.row == row]
        file = encode_file(
            path,
            lambda skipped, notes: self.encoder.encode(same, skipped, notes),
            cache=None,
            key="",
        )
        file.truncate(self._config.max_seq_len, at=self._config.cut)
        return (unread.problems | file.skipped.problems).get(row)

    def rows(self, path: Path, skipped: SkippedRows) -> Iterator[Row]:
        """Yield the readable rows of a file; count the other rows in `skipped`."""
        config = self._config
        fields = parse_fields(config.field)
        return read_rows(
            path,
            skipped,
            format=config.format,
            fields=fields,
            objective=config.objective,
            split_at=config.split_at,
        )

    def _key(self, path: Path) -> str:
        config = self._config
        if config.no_cache:
            return ""
        options = [name for name, option in OPTIONS.items() if option.encodes]
        dated = any("strftime_now" in source for source in self.template_source.values())
        try:
            return key_of(
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


def with_hub_data(
    config: Config, console: RunConsole, *, held_out: bool = False
) -> tuple[Config, dict[str, HubData]]:
    """Download the data sets that the options name, and add their commits to the names.

    The commit lets a resumed run find the same files. Also returns each data set by the name that
    it now has. With `held_out`, a name without a split stands for data to evaluate on. Raises
    DataError.
    """
    sets: dict[str, HubData] = {}

    def pinned(value: str, option: str = "data") -> str:
        meant = data_value(value, option)
        if meant.name is None:
            return value
        data = fetch(meant.name, held_out=held_out, quiet=config.quiet)
        sets[str(data.name)] = data
        files = pluralise(sum(map(len, data.files.values())), "file")
        console.say(
            "Hub",
            f"{' and '.join(data.titles.values())}: {files}, commit "
            f"{str(data.name.revision)[:10]}, licence: {data.license or 'not stated'}",
        )
        return str(data.name) + value.removeprefix(meant.text)

    data = tuple(map(pinned, config.data))
    changes: dict[str, Any] = {"data": data} if data != config.data else {}
    if config.val_data is not None:
        name = data_value(config.val_data, "val_data").name
        if name is not None and name.split is None:
            raise DataError(f"--val-data {name}: name one of its splits, as {name}:validation")
        if name is not None:
            changes["val_data"] = pinned(config.val_data, "val_data")
    return (replace(config, **changes) if changes else config), sets


@dataclass(frozen=True)
class DataSource:
    """The training and validation files, their data sets of the hub, and each file's weight."""

    files: DataFiles
    hub: list[HubData]
    weights: list[float]

    @property
    def titles(self) -> dict[Path, str]:
        """A readable name for each file."""
        named = {path: title for data in self.hub for path, title in data.title_of_files().items()}
        return {path: named.get(path, shown(path)) for path in self.files.all}


def find_data(config: DataConfig, sets: Mapping[str, HubData] | None = None) -> DataSource:
    """Return the data that the options name; `sets` are the data sets that are downloaded.

    Raises DataError if there is no training file, or if a file cannot be read.
    """
    hub: list[HubData] = []

    def files_of(value: DataValue) -> list[Path]:
        if value.name is None:
            return [as_path(value.text)]
        hub.append((sets or {}).get(str(value.name)) or fetch(value.name, quiet=config.quiet))
        return hub[-1].train

    train: list[Path] = []
    weights: dict[Path, float] = {}
    for value in config.data:
        meant = data_value(value)
        named = files_of(meant)
        train += named
        weights |= dict.fromkeys(named, meant.weight)
    validation = [path for data in hub for path in data.validation]
    texts = config.format == "text"
    files = find_data_files(train, validation_files=validation, texts=texts)
    if config.val_data is not None:
        validation_files = find_data_files(
            files_of(data_value(config.val_data, "val_data")), "--val-data"
        ).train
        files = DataFiles(files.train, validation_files)
    # A file from a folder has the folder's weight.
    weights_of_files = [weights[path if path in weights else path.parent] for path in files.train]
    return DataSource(files, hub, weights_of_files)


def load_rows(
    config: DataConfig, reader: Reader, source: DataSource
) -> tuple[list[EncodedFile], RunRows, list[Finding]]:
    """Read and encode the files, and choose the validation rows; return problems of that choice.

    Raises the errors of `load_dataset`.
    """
    paths, titles = source.files, source.titles
    files, cuts = [], []
    for path in paths.all:
        file = reader.encode(path)
        cut = file.truncate(config.max_seq_len, at=config.cut)
        _check_usable(file, cut, titles[path], config)
        files.append(file)
        cuts.append(cut)
    first = len(paths.train)
    names = list(map(shown, paths.all))
    corpus = Corpus(cuts[:first], names[:first], source.weights)
    has_own_validation = paths.validation or not config.val_split
    validation = Corpus(cuts[first:], names[first:]) if has_own_validation else None
    rows, problems = _choose_rows(config, corpus, validation, files)
    _check_vocabulary(config, reader, rows)
    return files, rows, problems


def load_dataset(config: DataConfig, reader: Reader, source: DataSource | None = None) -> Dataset:
    """Read and encode the data, choose the validation rows, and look for problems in the data.

    `source` is the data that the options name, if it is already found.

    Raises DataError if a file cannot be read or mixes formats, if too few rows are left or, with
    --strict, if a row is skipped. Raises ModelError if the tokenizer cannot be loaded or does not
    match the model.
    """
    source = source or find_data(config)
    titles = source.titles
    files, rows, held_out_findings = load_rows(config, reader, source)
    corpus, *others = rows.corpora
    validation = others[0] if others else None
    all_findings = [
        *findings.row_findings(files, corpus, validation, reader.text_hash),
        *findings.length_findings(corpus),
        *findings.template_findings("".join(reader.template_source.values()), config.thinking),
        *held_out_findings,
        *_encoding_findings(files),
    ]
    return Dataset(
        template=reader.describe(),
        template_added=reader.adds_template and not all(file.arrays.plain_text for file in files),
        rows=rows,
        files=files,
        ledgers=_ledgers(files, rows, [titles[path] for path in source.files.all]),
        findings=findings.by_loss(all_findings),
        hub=[data.about() for data in source.hub],
    )


def _encoding_findings(files: Sequence[EncodedFile]) -> Iterator[Finding]:
    """Yield a finding for each text file that is not in UTF-8."""
    for file in files:
        path = Path(file.skipped.path)
        if is_text_file(path) and (encoding := encoding_of(path)) != "utf-8":
            rows = int(file.arrays.rows_kept.sum())
            place = findings.Place(str(path), 1)
            advice = "check its accents, and save it in UTF-8 if they are wrong"
            yield Finding("warning", f"text read as {encoding}", rows, advice, (place,))


def _check_usable(file: EncodedFile, cut: ExampleArrays, path: str, config: DataConfig) -> None:
    rows_kept, skipped = int(cut.rows_kept.sum()), file.skipped
    read = rows_kept + skipped.total
    if skipped.total and config.strict:
        raise DataError(
            f"{skipped.first()}; {skipped.total} of {read} rows are bad: "
            "fix them, or leave out --strict to skip them"
        )
    if not read:
        raise DataError(f"{path} has no rows: add JSON objects, one per line")
    if not rows_kept:
        every = f"none of its {read:,} rows can be used"
        every = "its only row cannot be used" if read == 1 else every
        raise DataError(f"{path}: {every}; the first: {skipped.first()}")


def _choose_rows(
    config: DataConfig, corpus: Corpus, validation: Corpus | None, files: Sequence[EncodedFile]
) -> tuple[RunRows, list[Finding]]:
    """Choose the training and validation rows.

    If rows must be held out, but all rows are alike, `inspect` gets a finding, and no validation
    rows; for other commands, raises DataError.
    """
    if validation is not None or (corpus.clusters != corpus.clusters[0]).any():
        rows = RunRows.of(corpus, validation, config.val_split, config.seed, config.val_rows)
        return rows, []
    alike = "have the same prompt" if corpus.roles.any() else "are all the same"
    named = "one row" if corpus.num_rows == 1 else f"rows that {alike}"
    problem = f"{named} cannot be both trained on and held out"
    advice = "add rows or set --val-split 0"
    if isinstance(config, InspectConfig):
        return RunRows(corpus.select(), corpus.select([])), [Finding("error", problem, 0, advice)]
    skipped = [file.skipped for file in files if file.skipped.total]
    total = pluralise(sum(each.total for each in skipped), "other row")
    others = f"; skipped {total}, the first: {skipped[0].first()}" if skipped else ""
    raise DataError(f"{', '.join(map(shown, config.data))}: {problem}: {advice}{others}")


def _ledgers(files: Sequence[EncodedFile], rows: RunRows, paths: Sequence[str]) -> list[Ledger]:
    cuts = [cut for corpus in rows.corpora for cut in corpus.files]
    weights = [weight for corpus in rows.corpora for weight in corpus.weights]
    validates = rows.validation_rows_of_files()
    each_file = zip(files, paths, cuts, validates, weights, strict=True)
    return [
        file.ledger(cut, path=path, rows_validation=held_out, weight=weight)
        for file, path, cut, held_out, weight in each_file
    ]


def _check_vocabulary(config: DataConfig, reader: Reader, rows: RunRows) -> None:
    vocab_size = reader.vocab_size
    largest = max(corpus.largest_token() for corpus in rows.corpora)
    if vocab_size and largest >= vocab_size:
        raise ModelError(
            f"{config.model_path}: its tokenizer gives token {largest}, but the model knows only "
            f"{vocab_size} tokens: use the model's own tokenizer files"
        )


def report_findings(dataset: Dataset, console: RunConsole) -> None:
    """Warn of problems in the data. Raises DataError for a problem that rules out training."""
    # Warnings would hide the one problem that has to be fixed.
    for finding in dataset.findings:
        if finding.level == "error":
            raise DataError(run_text.finding_line(finding))
    for file in dataset.files:
        for warning in file.skipped.warnings():
            console.warn(warning)
    for finding in dataset.findings:
        if finding.level == "note":
            console.say("Note", run_text.finding_line(finding))
        else:
            console.warn(run_text.finding_line(finding))
