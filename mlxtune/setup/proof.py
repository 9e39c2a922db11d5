"""What `fuse` and `export` share: finding adapter and base, prompts, the proof and its report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from mlxtune.backend.adapters import proof
from mlxtune.backend.adapters.attach import base_options, load_adapted
from mlxtune.backend.adapters.files import find_adapter
from mlxtune.backend.adapters.formats.adapter import Adapter
from mlxtune.backend.adapters.formats.mlx_lm import read_mlx_lm
from mlxtune.backend.adapters.proof import Reference
from mlxtune.backend.model import loading, memory
from mlxtune.backend.model.loading import BaseModel
from mlxtune.backend.model.model_folder import find_folder, read_config
from mlxtune.backend.model.quantize import format_name
from mlxtune.config import DataConfig, as_path
from mlxtune.config.export import ImportConfig, OutgoingConfig
from mlxtune.config.options import OPTIONS
from mlxtune.config.row_fields import parse_fields
from mlxtune.core.data.bad_rows import SkippedRows
from mlxtune.core.data.encode import EncodedExample
from mlxtune.core.data.formats import read_rows
from mlxtune.core.data.notes import Notes
from mlxtune.core.machine.files import file_hash, read_json, write_json
from mlxtune.core.machine.output_folder import new_folder
from mlxtune.core.runs.certificate import CERTIFICATE, Certificate, WeightCheck, check, hashes
from mlxtune.core.training.checkpoint import ADAPTER, METADATA
from mlxtune.errors import ConfigError, MlxTuneError, ModelError
from mlxtune.setup.dataset import Reader, data_files
from mlxtune.setup.run_metadata import versions
from mlxtune.terminal.console import RunConsole
from mlxtune.terminal.output import print_json, print_line

_PROMPTS = 4
# How many rows of the data prompts are taken from, and the longest prompt in tokens.
_ROWS, _LONGEST = 64, 256
_BUILT_IN = (
    "Tell me a short story about a fox and a river.",
    "What is 17 + 25? Explain how you got there.",
    "Write a Python function that reverses a string.",
    "Name three cities in Europe, each with a sentence about it.",
)


@dataclass(frozen=True)
class Source:
    """A trained adapter and its base model on disk.

    `metadata` is the checkpoint's that holds the same adapter, or empty. `quantization` has the
    keywords with which `load_base` makes the base that the adapter was trained on.
    """

    folder: Path
    weights: Path
    adapter: Adapter
    metadata: Mapping[str, Any]
    quantization: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportResult:
    """The file or folder that was written, and how it compares with what was trained."""

    output: Path
    certificate: Certificate


def find_source(config: OutgoingConfig) -> Source:
    """Return the adapter and base model that the options name. Raises ModelError."""
    weights = find_adapter(config.adapter)
    adapter, metadata = read_mlx_lm(weights), _metadata_of(weights)
    relative_to = str(metadata.get("working_directory") or "")
    folder = find_base(config, adapter.model, relative_to, str(weights))
    quantization = base_options(weights, folder, trust_remote_code=config.trust_remote_code)
    return Source(folder, weights, adapter, metadata, quantization)


def find_base(
    config: OutgoingConfig | ImportConfig, named: str, relative_to: str, adapter: str
) -> Path:
    """Return the base model's folder: that of --model-path, or the one that the adapter names.

    The adapter's name for it may be relative to the folder `relative_to`. Raises ModelError.
    """
    path = config.model_path or named
    if not path:
        raise ModelError(f"{adapter}: names no base model: give --model-path")
    with suppress(OSError, ValueError):  # not a folder name, or a folder we may not read
        if not config.model_path and relative_to and (Path(relative_to) / path).is_dir():
            path = str(Path(relative_to) / path)
    try:
        folder = find_folder(path)
    except ModelError as error:
        if config.model_path:
            raise
        raise ModelError(f"{adapter}: its base model: {error}: give --model-path") from error
    read_config(folder, trust_remote_code=config.trust_remote_code)
    return folder


def _metadata_of(weights: Path) -> Mapping[str, Any]:
    """Return the metadata of the checkpoint with the same adapter: beside it, or of its run."""
    for folder in [weights.parent, *sorted(weights.parent.glob("checkpoints/*"))]:
        try:
            same = folder / ADAPTER == weights or (
                # A pipe or device could be read forever.
                (folder / ADAPTER).is_file()
                and (folder / ADAPTER).stat().st_size == weights.stat().st_size
                and file_hash(folder / ADAPTER) == file_hash(weights)
            )
            if same and (folder / METADATA).is_file():
                return read_json(folder / METADATA)
        except (OSError, ValueError):
            continue
    return {}


@contextmanager
def output_folder(config: OutgoingConfig, source: Source, console: RunConsole) -> Iterator[Path]:
    """Yield a folder to fill, put in place at --output when all went well.

    Reports the base first, if it was quantised while loading. Raises OutputError.
    """
    if source.quantization:
        name = format_name(**source.quantization)
        console.say("Base", f"{source.folder}, quantised to {name} while loading, as in training")
    sources = [source.folder, source.weights, source.weights.parent]
    with new_folder(
        config.output_path, sources, marker=CERTIFICATE, overwrite=config.overwrite
    ) as folder:
        yield folder


def make_reference(
    config: OutgoingConfig,
    source: Source,
    console: RunConsole,
    rounding: str = "float32",
    *,
    everywhere: bool = False,
) -> tuple[Reference, str]:
    """Run the trained model on prompts; return its logits, and the coarsest dtype involved.

    `rounding` is the dtype of what is written; with `everywhere`, all weights are rounded to it.
    The model is released before this returns. Raises a child of MlxTuneError.
    """
    prompts = choose_prompts(config, source, console)
    adapted = load_adapted(load_base(config, source), str(source.weights))
    dtype = proof.coarsest(rounding, adapted.base.dtype)
    reference = proof.reference_of(adapted, prompts, dtype, everywhere=everywhere)
    del adapted
    memory.release()
    return reference, dtype


def load_base(config: OutgoingConfig, source: Source) -> BaseModel:
    """Load the base that an adapter was trained on, as the proof runs it. Raises ModelError."""
    trust = config.trust_remote_code
    options = source.quantization
    return loading.load_base(source.folder, config.dtype, trust_remote_code=trust, **options)


def certify(
    config: OutgoingConfig,
    format: str,
    folder: Path,
    reference: Reference,
    dtype: str,
    load: Callable[[], Any],
    *,
    weights: WeightCheck | None = None,
    exact: bool = True,
) -> Certificate:
    """Compare the model that `load` returns with the reference; write the folder's certificate.

    With `exact` false, the weights were quantised again, which logits cannot judge. Raises
    OutputError if rounding does not explain the difference.
    """
    comparison = proof.compare(load(), reference)
    memory.release()
    certificate = Certificate(
        format=format,
        dtype=dtype,
        tolerance=reference.tolerance if exact else None,
        effect=reference.effect,
        comparison=comparison,
        files=hashes(folder),
        versions=versions(),
        weights=weights,
    )
    check(certificate, config.output_path)
    write_json(folder / CERTIFICATE, certificate.as_dict())
    return certificate


def choose_prompts(config: OutgoingConfig, source: Source, console: RunConsole) -> list[list[int]]:
    """Return the tokens of the prompts to compare on, and report where they come from.

    They come from --data, else from the run's data, else they are built in.
    """
    run = _run_data(source)
    rows: list[EncodedExample] = []
    if config.data:
        like = run or DataConfig(model_path=str(source.folder), data=config.data)
        rows = _read(config, source, vars(like) | {"data": config.data})
        console.say("Prompts", f"from {', '.join(config.data)}")
    else:
        if run is not None:
            with suppress(MlxTuneError):
                rows = _read(config, source, vars(run))
                console.say("Prompts", f"from the run's data, {', '.join(run.data)}")
        if not rows:
            rows = _read_built_in(config, source)
            console.say("Prompts", "built in, as the run's data cannot be read")
    if not rows:
        raise ModelError(f"{', '.join(config.data)}: no row gives a prompt: name other --data")
    return [_prompt(row) for row in rows[:: max(len(rows) // _PROMPTS, 1)][:_PROMPTS]]


def _prompt(row: EncodedExample) -> list[int]:
    start = row.spans[-1][0]
    # A plain text has no prompt; its first half serves as one.
    return list(row.ids[: start if start > 1 else max(len(row.ids) // 2, 1)])[:_LONGEST]


def _run_data(source: Source) -> DataConfig | None:
    """Return the options with which the adapter's run read its data; None if unknown."""
    options = source.metadata.get("config")
    relative_to = str(source.metadata.get("working_directory") or ".")
    if not isinstance(options, Mapping) or not isinstance(options.get("data"), list):
        return None
    known = {name: OPTIONS[name] for name in options if name in OPTIONS}
    reading = {name: options[name] for name, o in known.items() if o.encodes and o.inherited}
    data = tuple(str(Path(relative_to) / as_path(str(path))) for path in options["data"])
    try:
        return DataConfig(model_path=str(source.folder), data=data, **reading)
    except ConfigError:
        return None


def _read(
    config: OutgoingConfig, source: Source, options: Mapping[str, Any]
) -> list[EncodedExample]:
    """Return the last example of each of the first rows of data, as training encodes them."""
    data = DataConfig(**{**options, "trust_remote_code": config.trust_remote_code})
    encoder = Reader(data, source.folder).encoder
    examples: list[EncodedExample] = []
    for path in data_files(data):
        skipped = SkippedRows(path)
        rows = read_rows(path, skipped, format=data.format, fields=parse_fields(data.field))
        for chunk in encoder.encode(islice(rows, _ROWS), skipped, Notes()):
            examples += [of_row[-1] for _, of_row in chunk]
    return examples


def _read_built_in(config: OutgoingConfig, source: Source) -> list[EncodedExample]:
    chat = [
        {"messages": [{"role": role, "content": text} for role, text in turns]}
        for turns in ([("user", prompt), ("assistant", "Yes.")] for prompt in _BUILT_IN)
    ]
    text = [{"text": f"{prompt} {prompt}"} for prompt in _BUILT_IN]
    with tempfile.TemporaryDirectory(prefix="mlxtune-") as folder:
        path = Path(folder) / "prompts.jsonl"
        for rows in (chat, text):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            options = {"model_path": str(source.folder), "data": (str(path),)}
            try:
                if examples := _read(config, source, options):
                    return examples
            except ModelError:
                if rows is text:
                    raise
    raise ModelError(f"{source.folder}: its tokenizer gives no tokens for plain text: give --data")


def print_result(result: ExportResult, config: OutgoingConfig, usage: Iterable[str]) -> None:
    """Print a certificate and how to use what was written, or the certificate as JSON."""
    if config.json:
        print_json(result.certificate.as_dict())
        return
    lines = [("Wrote", f"{result.output}: {', '.join(result.certificate.files)}")]
    lines += [("Proof", line) for line in result.certificate.lines()]
    lines += [("Use it", line) for line in usage]
    previous = ""
    for name, line in lines:
        print_line(f"{name if name != previous else '':<12}{line}")
        previous = name
