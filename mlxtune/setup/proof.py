"""What `fuse` and `export` share: finding adapter and base, prompts, the proof and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
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
from mlxtune.backend.model.model_folder import find_folder
from mlxtune.backend.model.quantize import format_name
from mlxtune.config import DataConfig, as_path
from mlxtune.config.options import OPTIONS
from mlxtune.config.use import ImportConfig, OutgoingConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.data.problems import RowTally, SkippedRows
from mlxtune.core.data.prompt import last_answer, prompt_of
from mlxtune.core.machine.files import file_hash, read_json, write_json
from mlxtune.core.machine.output_folder import new_folder
from mlxtune.core.runs.certificate import CERTIFICATE, Certificate, WeightCheck, check, hashes
from mlxtune.core.runs.run import mapping
from mlxtune.core.training.checkpoint import ADAPTER, METADATA
from mlxtune.errors import DataError, MlxTuneError, ModelError
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
    quantization: Mapping[str, Any]


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


def output_folder(
    config: OutgoingConfig, source: Source, console: RunConsole
) -> AbstractContextManager[Path]:
    """Return a context whose folder is put in place at --output when all went well.

    Reports the base first, if it was quantised while loading. Raises OutputError.
    """
    if source.quantization:
        name = format_name(**source.quantization)
        console.say("Base", f"{source.folder}, quantised to {name} while loading, as in training")
    sources = [source.folder, source.weights, source.weights.parent]
    return new_folder(config.output_path, sources, marker=CERTIFICATE, overwrite=config.overwrite)


def make_reference(
    config: OutgoingConfig,
    source: Source,
    console: RunConsole,
    rounding: str = "float32",
    *,
    everywhere: bool = False,
) -> Reference:
    """Run the trained model on prompts, and return its logits.

    `rounding` is the dtype of what is written; with `everywhere`, all weights are rounded to it.
    The model is released before this returns. Raises a child of MlxTuneError.
    """
    prompts = choose_prompts(config, source, console)
    adapted = load_adapted(load_base(config, source), str(source.weights))
    reference = proof.reference_of(adapted, prompts, rounding, everywhere=everywhere)
    del adapted
    memory.release()
    return reference


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
        dtype=reference.dtype,
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
    try:
        data = DataConfig(**_reading(config, source))
        prompts = _read_prompts(data, source.folder)
        whose = "" if config.data else "the run's data, "
        console.say("Prompts", f"from {whose}{', '.join(data.data)}")
    except MlxTuneError:
        if config.data:
            raise
        console.say("Prompts", "built in, as the run's data cannot be read")
        prompts = _built_in_prompts(config, source)
    return prompts


def _reading(config: OutgoingConfig, source: Source) -> dict[str, Any]:
    """Return the options with which the adapter's run read its data, with --data if given."""
    options = mapping(source.metadata, "config")
    known = {name: OPTIONS[name] for name in options if name in OPTIONS}
    reading = {name: options[name] for name, o in known.items() if o.encodes and o.inherited}
    data: Any = config.data or options.get("data")
    if not config.data and isinstance(data, list):
        relative_to = str(source.metadata.get("working_directory") or ".")
        data = [str(Path(relative_to) / as_path(str(path))) for path in data]
    own = {"model_path": str(source.folder), "trust_remote_code": config.trust_remote_code}
    return reading | own | {"data": data}


def _read_prompts(data: DataConfig, folder: Path) -> list[list[int]]:
    """Return the prompts of a few rows, as training encodes them. Raises DataError for none."""
    reader = Reader(data, folder)
    examples: list[Example] = []
    for path in data_files(data).all:
        skipped = SkippedRows(path)
        rows = islice(reader.rows(path, skipped), _ROWS)
        for chunk in reader.encoder.encode(rows, skipped, RowTally()):
            examples += [of_row[-1] for of_row in chunk]
    if not examples:
        raise DataError(f"{', '.join(data.data)}: no row gives a prompt: name other --data")
    prompts = []
    for example in examples[:: max(len(examples) // _PROMPTS, 1)][:_PROMPTS]:
        start, _ = last_answer(example)
        # A plain text has no prompt; its first half serves as one.
        end = start if start > 1 else max(len(example) // 2, 1)
        prompts.append(example.tokens[:end].tolist()[:_LONGEST])
    return prompts


def _built_in_prompts(config: OutgoingConfig, source: Source) -> list[list[int]]:
    folder, trust = source.folder, config.trust_remote_code
    data = DataConfig(str(folder), data=_BUILT_IN, trust_remote_code=trust)
    encoder = Reader(data, folder).encoder
    where = f"{folder}: a built-in prompt, for which --data is the alternative"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in _BUILT_IN[:_PROMPTS]]
    prompts = [list(prompt_of(encoder, row, where).ids) for row in rows]
    if not all(prompts):
        raise ModelError(f"{folder}: its tokenizer gives no tokens for text: give --data")
    return prompts


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
