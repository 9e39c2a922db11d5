"""The half of `fuse` and `export` that they share: base and adapter found, prompts, the proof.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxtune.config import DataConfig, as_path
from mlxtune.config.export import ImportConfig, OutgoingConfig
from mlxtune.config.options import OPTIONS
from mlxtune.errors import ConfigError, MlxTuneError, ModelError, printable
from mlxtune.setup.dataset import Reader, data_files
from mlxtune.setup.run_metadata import versions

if TYPE_CHECKING:
    from mlxtune.backend.adapters.formats.adapter import Adapter
    from mlxtune.backend.adapters.proof import Reference
    from mlxtune.backend.model.loading import BaseModel
    from mlxtune.core.data.encode import EncodedExample
    from mlxtune.core.runs.certificate import Certificate, WeightCheck
    from mlxtune.terminal.console import RunConsole

_PROMPTS = 4
# Of the data, how many rows the prompts are taken from, and the longest prompt in tokens.
_ROWS, _LONGEST = 64, 256
_BUILT_IN = (
    "Tell me a short story about a fox and a river.",
    "What is 17 + 25? Explain how you got there.",
    "Write a Python function that reverses a string.",
    "Name three cities in Europe, each with a sentence about it.",
)


@dataclass(frozen=True)
class Source:
    """A trained adapter and its base model, as they lie on disk.

    `metadata` is what the checkpoint says that the adapter is of; empty where there is none.
    `quantization` has the keywords of `load_base` that make of the folder what was trained on.
    """

    folder: Path
    weights: Path
    adapter: Adapter
    metadata: Mapping[str, Any]
    quantization: Mapping[str, Any] = field(default_factory=dict)


def find_source(config: OutgoingConfig) -> Source:
    """Return the adapter and the base model that the options mean. Raises ModelError."""
    from mlxtune.backend.adapters.attach import base_options
    from mlxtune.backend.adapters.files import find_adapter
    from mlxtune.backend.adapters.formats.mlx_lm import read_mlx_lm

    weights = find_adapter(config.adapter)
    adapter, metadata = read_mlx_lm(weights), _metadata_of(weights)
    there = str(metadata.get("working_directory") or "")
    folder = find_base(config, adapter.model, there, str(weights))
    how = base_options(weights, folder, trust_remote_code=config.trust_remote_code)
    return Source(folder, weights, adapter, metadata, how)


def find_base(config: OutgoingConfig | ImportConfig, named: str, there: str, adapter: str) -> Path:
    """Return the base model's folder: the one given, or the one that an adapter names.

    `there` is the folder that the name may be relative to. Raises ModelError.
    """
    from mlxtune.backend.model.model_folder import find_folder, read_config

    path = config.model_path or named
    if not path:
        raise ModelError(f"{adapter}: names no base model: give --model-path")
    try:
        if not config.model_path and there and (Path(there) / path).is_dir():
            path = str(Path(there) / path)
    except (OSError, ValueError):  # no name of a folder, or one that is not ours to look into
        pass
    try:
        folder = find_folder(path)
    except ModelError as error:
        if config.model_path:
            raise
        raise ModelError(f"{adapter}: its base model: {error}: give --model-path") from error
    read_config(folder, trust_remote_code=config.trust_remote_code)
    return folder


def _metadata_of(weights: Path) -> Mapping[str, Any]:
    """Return what the checkpoint says that has the same adapter: beside it, or of its run."""
    from mlxtune.core.machine.files import file_hash, read_json
    from mlxtune.core.training.checkpoint import ADAPTER, METADATA

    folders = [weights.parent, *sorted(weights.parent.glob("checkpoints/*"))]
    for folder in folders:
        try:
            same = folder / ADAPTER == weights or (
                # Neither a pipe nor a device, which would be read for ever.
                (folder / ADAPTER).is_file()
                and (folder / ADAPTER).stat().st_size == weights.stat().st_size
                and file_hash(folder / ADAPTER) == file_hash(weights)
            )
            if same and (folder / METADATA).is_file():
                return read_json(folder / METADATA)
        except (OSError, ValueError):
            continue
    return {}


def reference_of(
    config: OutgoingConfig,
    source: Source,
    say: Callable[[str], None],
    rounding: str = "float32",
    *,
    everywhere: bool = False,
) -> tuple[Reference, str]:
    """Run the trained model on prompts; return what it gives, and the dtype that rounds most.

    `rounding` is a dtype that what is written is rounded to, and `everywhere` whether all weights
    are. The model is let go before this returns. Raises a child of MlxTuneError.
    """
    from mlxtune.backend.adapters import proof
    from mlxtune.backend.adapters.attach import load_adapted
    from mlxtune.backend.model import memory

    prompts = list(prompts_of(config, source, say))
    adapted = load_adapted(load_base_of(config, source), str(source.weights))
    dtype = proof.coarsest(rounding, adapted.base.dtype)
    reference = proof.reference_of(adapted, prompts, dtype, everywhere=everywhere)
    del adapted
    memory.release()
    return reference, dtype


def load_base_of(config: OutgoingConfig, source: Source) -> BaseModel:
    """Load the base that an adapter was trained on, as the proof runs it. Raises ModelError."""
    return load_model(config, source.folder, **source.quantization)


def load_model(config: OutgoingConfig, folder: Path, **quantization: Any) -> BaseModel:
    """Load a model as the proof runs it. Raises ModelError."""
    from mlxtune.backend.model.loading import load_base

    trust = config.trust_remote_code
    return load_base(folder, config.dtype, trust_remote_code=trust, **quantization)


def say_base(source: Source, console: RunConsole) -> None:
    """Say what the adapter was trained on, where that is not the folder as it is."""
    from mlxtune.backend.model.quantize import format_name

    if source.quantization:
        name = format_name(**source.quantization)
        console.say("Base", f"{source.folder}, quantised to {name} while loading, as in training")


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
    """Load what was written into a folder by `load`, compare it, and write its certificate.

    With `exact` false, the weights were quantised again, which logits cannot judge. Raises
    OutputError where rounding does not explain the difference.
    """
    from mlxtune.backend.adapters import proof
    from mlxtune.backend.model import memory
    from mlxtune.core.machine.files import write_json
    from mlxtune.core.runs.certificate import CERTIFICATE, Certificate, check, hashes

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


def prompts_of(
    config: OutgoingConfig, source: Source, say: Callable[[str], None]
) -> Iterator[list[int]]:
    """Yield the tokens of the prompts to compare on, and `say` where they are from.

    They are from --data, else from the data of the run, else built in.
    """
    run = _data_of_run(source)
    if config.data:
        like = run or DataConfig(model_path=str(source.folder), data=config.data)
        rows = _read(config, source, vars(like) | {"data": config.data})
        say(f"of {', '.join(config.data)}")
    else:
        rows = []
        if run is not None:
            try:
                rows = _read(config, source, vars(run))
                say(f"of the run's data, {', '.join(run.data)}")
            except MlxTuneError:
                rows = []
        if not rows:
            rows = _read_built_in(config, source)
            say("built-in ones, as the run's data is not at hand")
    if not rows:
        raise ModelError(f"{', '.join(config.data)}: has no row that gives a prompt")
    step = max(len(rows) // _PROMPTS, 1)
    for row in rows[::step][:_PROMPTS]:
        start = row.spans[-1][0]
        # A text has no prompt: the first half of it is one.
        prompt = list(row.ids[: start if start > 1 else max(len(row.ids) // 2, 1)])
        yield prompt[:_LONGEST]


def _data_of_run(source: Source) -> DataConfig | None:
    """Return how and from where the data of the adapter's run is read; None where unknown."""
    own, there = source.metadata.get("config"), source.metadata.get("working_directory") or "."
    if not isinstance(own, Mapping) or not isinstance(own.get("data"), list):
        return None
    known = {name: OPTIONS[name] for name in own if name in OPTIONS}
    like = {name: own[name] for name, each in known.items() if each.encodes and each.inherited}
    data = tuple(str(Path(str(there)) / as_path(str(path))) for path in own["data"])
    try:
        return DataConfig(model_path=str(source.folder), data=data, **like)
    except ConfigError:
        return None


def _read(
    config: OutgoingConfig, source: Source, options: Mapping[str, Any]
) -> list[EncodedExample]:
    """Return the examples of the first rows of data, as training would have them."""
    from mlxtune.config.row_fields import parse_fields
    from mlxtune.core.data.bad_rows import SkippedRows
    from mlxtune.core.data.formats import read_rows
    from mlxtune.core.data.notes import Notes

    data = DataConfig(**{**options, "trust_remote_code": config.trust_remote_code})
    encoder = Reader(data, source.folder).encoder
    found: list[EncodedExample] = []
    for path in data_files(data):
        skipped = SkippedRows(path)
        rows = read_rows(path, skipped, format=data.format, fields=parse_fields(data.field))
        for chunk in encoder.encode(islice(rows, _ROWS), skipped, Notes()):
            found += [examples[-1] for _, examples in chunk]
    return found


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
                if found := _read(config, source, options):
                    return found
            except ModelError:
                if rows is text:
                    raise
    raise ModelError(f"{source.folder}: its tokenizer gives no token for plain text: give --data")


@dataclass(frozen=True)
class ExportResult:
    """What was written, and how it compares with what was trained."""

    output: Path
    certificate: Certificate


def ask(config: OutgoingConfig) -> RunConsole:
    """Return what says the stages."""
    import mlxtune.backend  # noqa: F401  a fast BLAS, before anything imports mlx
    from mlxtune.terminal.console import RunConsole

    return RunConsole(quiet=config.quiet)


def say_result(result: ExportResult, config: OutgoingConfig, usage: Iterable[str]) -> None:
    """Print a certificate: lines, or JSON."""
    if config.json:
        json.dump(result.certificate.as_dict(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return
    lines = [("Wrote", f"{result.output}: {', '.join(result.certificate.files)}")]
    lines += [("Proof", line) for line in result.certificate.lines()]
    lines += [("Use it", line) for line in usage]
    before = ""
    for name, line in lines:
        print(printable(f"{name if name != before else '':<12}{line}"))
        before = name
