"""What `fuse` and `export` share: finding adapter and base, the output folder, the proof."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxtune.backend.adapters import proof
from mlxtune.backend.adapters.attach import base_options, check_base, load_adapted
from mlxtune.backend.adapters.certificate import CERTIFICATE, Certificate, WeightCheck, check
from mlxtune.backend.adapters.files import find_adapter, read_info
from mlxtune.backend.adapters.formats.adapter import Adapter
from mlxtune.backend.adapters.formats.mlx_lm import read_mlx_lm
from mlxtune.backend.adapters.retention import Retention
from mlxtune.backend.device import memory
from mlxtune.backend.lora.targets import projections_of
from mlxtune.backend.models import loading
from mlxtune.backend.models.loading import BaseModel, open_base
from mlxtune.backend.models.model_folder import find_folder, is_local, read_config
from mlxtune.backend.models.quantize import format_name
from mlxtune.commands.prepare.dataset import Reader
from mlxtune.commands.prepare.interrupt import end_in_order
from mlxtune.commands.prepare.unfinished import noted, remove_unfinished
from mlxtune.config import DataConfig, ImportConfig, OutgoingConfig
from mlxtune.core.data.prompt import prompt_of
from mlxtune.core.files.files import file_hash, read_json, write_json
from mlxtune.core.files.output_folder import hashes, new_folder
from mlxtune.core.machine.facts import versions
from mlxtune.core.run.checkpoint import ADAPTER, METADATA
from mlxtune.core.run.own_runs import is_own
from mlxtune.errors import ModelError
from mlxtune.views.console import RunConsole
from mlxtune.views.output import print_json, print_line

_PROMPTS = (
    "Tell me a short story about a fox and a river.",
    "What is 17 + 25? Explain how you got there.",
    "Write a Python function that reverses a string.",
    "Name three cities in Europe, each with a sentence about it.",
)


@dataclass(frozen=True)
class Source:
    """A trained adapter and its base model on disk, named by the options of `config`.

    `metadata` is the checkpoint's that holds the same adapter, or empty; `run` is the folder of
    that checkpoint's run. `quantization` has the keywords with which `load_base` makes the base
    that the adapter was trained on.
    """

    config: OutgoingConfig
    console: RunConsole
    folder: Path
    weights: Path
    adapter: Adapter
    metadata: Mapping[str, Any]
    run: Path | None
    quantization: Mapping[str, Any]


@dataclass(frozen=True)
class ExportResult:
    """The file or folder that was written, and how it compares with the trained model."""

    output: Path
    certificate: Certificate


def find_source(config: OutgoingConfig) -> Source:
    """Return the adapter and base model that the options name. Raises ModelError."""
    weights = find_adapter(config.adapter)
    info, (metadata, run) = read_info(weights), metadata_of(weights)
    relative_to = str(metadata.get("working_directory") or "")
    folder = find_base(config, info.model, relative_to, str(weights), run)
    check_base(weights, folder, other_base=config.other_base)
    base = open_base(folder, "float32", trust_remote_code=config.trust_remote_code)
    adapter = read_mlx_lm(weights, projections_of(base.model))
    quantization = base_options(weights, folder, trust_remote_code=config.trust_remote_code)
    console = RunConsole(quiet=config.quiet)
    return Source(config, console, folder, weights, adapter, metadata, run, quantization)


def find_base(
    config: ImportConfig, named: str, relative_to: str, adapter: str, run: Path | None
) -> Path:
    """Return the base model's folder, from --model-path or else by its name in the adapter.

    The adapter's name for it may be relative to the folder `relative_to`. It is only downloaded
    under that name if this user made the adapter's `run`. Its config is checked.

    Raises ModelError.
    """
    path = config.model_path or named
    if not path:
        raise ModelError(f"{adapter}: names no base model: give --model-path")
    with suppress(OSError, ValueError):  # not a folder name, or a folder we may not read
        if not config.model_path and relative_to and (Path(relative_to) / path).is_dir():
            path = str(Path(relative_to) / path)
    if not (config.model_path or is_local(path) or (run is not None and is_own(run))):
        raise ModelError(
            f"{adapter}: its base model is not here, and you did not make the adapter on this "
            f"machine: to download the model, give --model-path {shlex.quote(path)}"
        )
    try:
        folder = find_folder(path)
    except ModelError as error:
        if config.model_path:
            raise
        raise ModelError(f"{adapter}: its base model: {error}: give --model-path") from error
    read_config(folder, trust_remote_code=config.trust_remote_code)
    return folder


def metadata_of(weights: Path) -> tuple[Mapping[str, Any], Path | None]:
    """Return the metadata of the checkpoint with the same adapter, and the folder of its run.

    The checkpoint is the adapter's own folder, or one of the run that wrote it.
    """
    for folder in [weights.parent, *sorted(weights.parent.glob("checkpoints/*"))]:
        try:
            same = folder / ADAPTER == weights or (
                # A pipe or device could be read forever.
                (folder / ADAPTER).is_file()
                and (folder / ADAPTER).stat().st_size == weights.stat().st_size
                and file_hash(folder / ADAPTER) == file_hash(weights)
            )
            if same and (folder / METADATA).is_file():
                return read_json(folder / METADATA), folder.parent
        except (OSError, ValueError):
            continue
    return {}, None


@contextmanager
def output_folder(source: Source) -> Iterator[Path]:
    """Yield a folder that is put in place at --output when all went well.

    Reports the base first, if it was quantised while loading. Nothing is left if a signal ends the
    process, and what a kill left is removed the next time. Raises OutputError.
    """
    config, console = source.config, source.console
    if source.quantization:
        name = format_name(**source.quantization)
        console.say("Base", f"{source.folder}, quantised to {name} while loading, as in training")
    sources = [source.folder, source.weights, source.weights.parent]
    target, overwrite = config.output_path, config.overwrite
    for left in remove_unfinished():
        console.say("Removed", f"{left}, which a killed process left")
    with (
        end_in_order(),
        new_folder(target, sources, manifest=CERTIFICATE, overwrite=overwrite) as folder,
        noted(folder),
    ):
        yield folder


def load_base(source: Source) -> BaseModel:
    """Load the base that an adapter was trained on, as the proof runs it. Raises ModelError."""
    dtype, trust = source.config.dtype, source.config.trust_remote_code
    quantization = source.quantization
    return loading.load_base(source.folder, dtype, trust_remote_code=trust, **quantization)


def prove(
    source: Source,
    format: str,
    folder: Path,
    load: Callable[[], Any],
    *,
    rounding: str = "float32",
    everywhere: bool = False,
    weights: WeightCheck | None = None,
    exact: bool = True,
    retention: Retention | None = None,
) -> ExportResult:
    """Compare the model that `load` returns with the trained one; write the folder's certificate.

    `rounding` is the dtype of what was written; with `everywhere`, all weights were rounded to it.
    With `exact` false, they were quantised again, which logits cannot judge. No two models are
    loaded at once. Raises OutputError if rounding does not explain the difference.
    """
    source.console.say("Proving", "running the trained model, then what was written")
    prompts = prompts_for(source)
    adapted = load_adapted(load_base(source), str(source.weights))
    reference = proof.reference_of(adapted, prompts, rounding, everywhere=everywhere)
    del adapted
    memory.release()
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
        retention=retention,
    )
    output = source.config.output_path
    check(certificate, output)
    write_json(folder / CERTIFICATE, certificate.as_dict())
    return ExportResult(output, certificate)


def prompts_for(source: Source) -> list[list[int]]:
    """Return the tokens of the prompts to compare on, as `generate` would make them."""
    trust = source.config.trust_remote_code
    data = DataConfig(str(source.folder), data=_PROMPTS, trust_remote_code=trust)
    encoder = Reader(data, source.folder).encoder
    prompts = []
    for text in _PROMPTS:
        asked = {"messages": [{"role": "user", "content": text}]}
        prompt = prompt_of(encoder, asked, f"{source.folder}: a prompt of the proof")
        prompts.append(list(prompt.ids))
    if not all(prompts):
        raise ModelError(f"{source.folder}: its tokenizer gives no tokens for text")
    return prompts


def print_result(result: ExportResult, config: OutgoingConfig) -> None:
    if config.json:
        print_json(result.certificate.as_dict())
        return
    print_line(f"{'Wrote':<12}{result.output}: {', '.join(result.certificate.files)}")
    for line in result.certificate.lines():
        print_line(f"{'Proof':<12}{line}")
