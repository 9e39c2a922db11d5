"""Reads data files into examples, for every command that needs data."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mlxtune.config import DataConfig, InspectConfig, as_path
from mlxtune.core.data import findings
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encoded_file import EncodedFile, TruncatedFile
from mlxtune.core.data.findings import Finding
from mlxtune.core.data.held_out import RunRows
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.data.problems import (
    path_text,
)
from mlxtune.core.data.sources.datafiles import DataFiles, find_data_files, held_out_file, needs
from mlxtune.core.data.sources.keys import field_option
from mlxtune.core.data.sources.text_rows import GUESSED_ENCODINGS, encoding_of, is_text_file
from mlxtune.core.formatting import pluralize
from mlxtune.errors import DataError, ModelError, shorten
from mlxtune.hub.dataset_download import HubData, fetch
from mlxtune.hub.dataset_name import DataValue, data_value
from mlxtune.session.reader import Reader
from mlxtune.views import run_text
from mlxtune.views.console import RunConsole

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
    files: list[TruncatedFile]
    ledgers: list[Ledger]
    findings: list[Finding]
    hub: list[dict[str, Any]]

    @property
    def corpus(self) -> Corpus:
        """All rows of the training files, held-out rows included."""
        return self.rows.train.corpus

    @property
    def is_plain_text(self) -> bool:
        """Whether all rows are plain text, to which no template applies."""
        return all(file.arrays.is_plain_text for file in self.files)


def with_hub_data(
    config: Config, console: RunConsole, *, held_out: bool = False
) -> tuple[Config, dict[str, HubData]]:
    """Download the data sets that the options name, and add their commits to the names.

    The commit lets a resumed run find the same files. Also returns each data set by the name that
    it now has. With `held_out`, a name without a split and a folder stand for data to evaluate on.
    Raises DataError.
    """
    sets: dict[str, HubData] = {}

    def pinned(value: str, option: str = "data") -> str:
        meant = data_value(value, option)
        if meant.name is None:
            folder = as_path(meant.text)
            # Unlike Path.is_dir, os.path.isdir accepts a name of any length.
            if not held_out or not os.path.isdir(folder):  # noqa: PTH112
                return value
            return str(held_out_file(folder)) + value.removeprefix(meant.text)
        data = fetch(meant.name, held_out=held_out, quiet=config.quiet)
        sets[str(data.name)] = data
        files = pluralize(sum(map(len, data.files.values())), "file")
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
        return {path: named.get(path, path_text(path)) for path in self.files.all}


def find_data(config: DataConfig, sets: Mapping[str, HubData] | None = None) -> DataSource:
    """Return the data that the options name; `sets` are the data sets that are downloaded.

    Raises DataError if there is no training file, or if a file cannot be read.
    """
    texts = config.format == "text"
    return find_named_data(config.data, config.val_data, sets, texts=texts, quiet=config.quiet)


def find_named_data(
    data: Sequence[str],
    val_data: str | None = None,
    sets: Mapping[str, HubData] | None = None,
    *,
    texts: bool = False,
    quiet: bool = False,
) -> DataSource:
    """Return the data of values of --data and --val-data; with `texts`, the files are plain text.

    Raises the errors of `find_data`.
    """
    hub: list[HubData] = []

    def files_of(value: DataValue) -> list[Path]:
        if value.name is None:
            return [as_path(value.text)]
        hub.append((sets or {}).get(str(value.name)) or fetch(value.name, quiet=quiet))
        return hub[-1].train

    train: list[Path] = []
    weights: dict[Path, float] = {}
    for value in data:
        meant = data_value(value)
        named = files_of(meant)
        train += named
        weights |= dict.fromkeys(named, meant.weight)
    validation = [path for data in hub for path in data.validation]
    files = find_data_files(train, validation_files=validation, texts=texts)
    if val_data is not None:
        validation_files = find_data_files(
            files_of(data_value(val_data, "val_data")), "--val-data"
        ).train
        files = replace(files, validation=validation_files)
    # A file from a folder, or from a folder within it, has the weight of the nearest one named.
    weights_of_files = [
        next(weights[each] for each in (path, *path.parents) if each in weights)
        for path in files.train
    ]
    return DataSource(files, hub, weights_of_files)


def load_rows(
    config: DataConfig, reader: Reader, source: DataSource
) -> tuple[list[TruncatedFile], RunRows, list[Finding]]:
    """Read and encode the files, and choose the validation rows; return problems of that choice.

    Raises the errors of `load_dataset`.
    """
    paths, titles = source.files, source.titles
    limit, end = config.max_seq_len, config.cut
    files = [reader.encode(path).truncate(limit, at=end) for path in paths.all]
    _check_fields(files)
    for path, file in zip(paths.all, files, strict=True):
        _check_usable(file, titles[path], needs(path), config)
    first = len(paths.train)
    names = list(map(path_text, paths.all))
    corpus = Corpus.of_files(files[:first], names[:first], source.weights)
    holds_nothing_out = paths.validation or not config.val_split
    validation = Corpus.of_files(files[first:], names[first:]) if holds_nothing_out else None
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
    all_findings = [
        *findings.row_findings(files, rows, reader.text_hash),
        *findings.length_findings(rows.train.corpus),
        *findings.template_findings("".join(reader.template_source.values()), config.thinking),
        *held_out_findings,
        *_encoding_findings(files),
        *_blank_findings(source.files.blank),
    ]
    return Dataset(
        template=reader.describe(),
        template_added=reader.adds_template
        and not all(file.arrays.is_plain_text for file in files),
        rows=rows,
        files=files,
        ledgers=_ledgers(files, rows, [titles[path] for path in source.files.all]),
        findings=findings.by_loss(all_findings),
        hub=[data.about() for data in source.hub],
    )


def _encoding_findings(files: Sequence[EncodedFile]) -> Iterator[Finding]:
    """Yield a finding for each text file whose encoding is a guess."""
    for file in files:
        path = Path(file.skipped.path)
        if is_text_file(path) and (encoding := encoding_of(path)) in GUESSED_ENCODINGS:
            rows = int(file.arrays.rows_kept.sum())
            place = findings.Place(str(path), 1)
            advice = "check its accents, and save it in UTF-8 if they are wrong"
            yield Finding("warning", f"text read as {encoding}", rows, advice, (place,))


def _blank_findings(paths: Sequence[Path]) -> Iterator[Finding]:
    if paths:
        place = findings.Place(str(paths[0]), 1)
        advice = "it has no text to train on"
        yield Finding("note", "empty file is left out", len(paths), advice, (place,))


def _check_fields(files: Sequence[EncodedFile]) -> None:
    """Raise DataError for a --field whose key no row has."""
    absent = set.intersection(*(set(file.skipped.absent.items()) for file in files))
    if absent:
        name, key = min(absent)
        raise DataError(
            f"no row has the key {shorten(key)}: correct or leave out {field_option(name, key)}"
        )


def _check_usable(file: TruncatedFile, path: str, needed: str, config: DataConfig) -> None:
    rows_kept, skipped = file.rows_kept, file.skipped
    read = rows_kept + skipped.total
    one = skipped.total == 1
    if skipped.total and config.strict:
        are, them = ("is", "it") if one else ("are", "them")
        raise DataError(
            f"{skipped.first()}; {skipped.total} of {pluralize(read, 'row')} {are} bad: "
            f"fix {them}, or leave out --strict to skip {them}"
        )
    if not read:
        raise DataError(f"{path} has no rows: it needs {needed}")
    if not rows_kept:
        every = f"none of its {read:,} rows can be used; the first"
        every = "its only row cannot be used" if one else every
        raise DataError(f"{path}: {every}: {skipped.first()}")


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
    total = pluralize(sum(each.total for each in skipped), "other row")
    first = ": " if total == "1 other row" else ", the first: "
    others = f"; skipped {total}{first}{skipped[0].first()}" if skipped else ""
    raise DataError(f"{', '.join(map(path_text, config.data))}: {problem}: {advice}{others}")


def _ledgers(files: Sequence[TruncatedFile], rows: RunRows, paths: Sequence[str]) -> list[Ledger]:
    weights = [weight for corpus in rows.corpora for weight in corpus.weights]
    validates = rows.validation_rows_of_files()
    return [
        file.ledger(path=path, rows_validation=held_out, weight=weight)
        for file, path, held_out, weight in zip(files, paths, validates, weights, strict=True)
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
