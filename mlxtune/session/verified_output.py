"""Code that `fuse` and `export` share, to find the inputs, and to write and test the output."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxtune.backend.adapters import attach, compare_logits, fusing
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.certificate import (
    CERTIFICATE,
    Certificate,
    Retention,
    WeightCheck,
    check,
)
from mlxtune.backend.adapters.file_formats import merged_gguf
from mlxtune.backend.adapters.file_formats.adapter import Adapter
from mlxtune.backend.adapters.file_formats.mlx_lm import read_mlx_lm
from mlxtune.backend.adapters.fusing import Fusion
from mlxtune.backend.adapters.storage import AS_BASE, Storage
from mlxtune.backend.device import allocator
from mlxtune.backend.lora.targets import projections_of
from mlxtune.backend.models import loading
from mlxtune.backend.models.loading import BaseModel, open_base
from mlxtune.backend.models.model_folder import read_config
from mlxtune.backend.models.quantize import is_quantized
from mlxtune.config import OutgoingConfig, UseConfig, user_cache
from mlxtune.config.data_config import BaseOptions
from mlxtune.core.data.problems import advice_on
from mlxtune.core.data.prompt import prompt_of
from mlxtune.core.files.lock import Lock, LockHeldError, holder_of
from mlxtune.core.files.ours import discard, is_folder, remove_file
from mlxtune.core.files.output_folder import hashes, new_folder
from mlxtune.core.files.reading import read_json
from mlxtune.core.files.writing import (
    as_output_error,
    is_temporary,
    make_folder,
    write_file,
    write_json,
)
from mlxtune.core.formatting import format_name, pluralize
from mlxtune.core.machine.facts import versions
from mlxtune.errors import ModelError
from mlxtune.session.interrupt import interrupt_on_signal
from mlxtune.session.reader import Reader
from mlxtune.session.trained_model import (
    find_base,
    is_trained_on_text,
    warn_of_template,
    with_recorded_options,
)
from mlxtune.views.console import RunConsole
from mlxtune.views.output import print_json, print_line

# The folder of notes, in the user's cache, on folders that are being filled. Only mlxtune writes
# notes, so folders of other programs are never removed.
_NOTES = "unfinished"
_PROMPTS = (
    "Tell me a short story about a fox and a river.",
    "What is 17 + 25? Explain how you got there.",
    "Write a Python function that reverses a string.",
    "Name three cities in Europe, each with a sentence about it.",
)


@dataclass(frozen=True)
class TrainedAdapter:
    """A trained adapter and its base model on disk, named by the options of `config`.

    `file` is the adapter's file, and `base_options` open the base as in training.
    """

    config: OutgoingConfig
    console: RunConsole
    folder: Path
    file: AdapterFile
    adapter: Adapter
    base_options: BaseOptions

    @property
    def fusion(self) -> Fusion:
        """The base and the adapter, to fuse them."""
        return Fusion(self.folder, self.adapter, self.base_options)

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """The base model's config.json. Raises ModelError."""
        return read_config(self.folder, trust_remote_code=self.config.trust_remote_code)

    @property
    def has_quantized_base(self) -> bool:
        """Whether the base is quantised, as stored or while loading."""
        return is_quantized(self.model_config) or self.base_options.quantize is not None

    @cached_property
    def trained(self) -> UseConfig:
        """The options of prompts, as in training. Raises ModelError."""
        trust = self.config.trust_remote_code
        use = UseConfig(str(self.folder), adapter=str(self.file.path), trust_remote_code=trust)
        return with_recorded_options(use, self.file)

    @cached_property
    def reader(self) -> Reader:
        """The reader of prompts, as in training."""
        return Reader(self.trained.reading_config(), self.folder)

    @property
    def is_of_conversations(self) -> bool:
        """Whether the adapter was trained on conversations, and prompts can be rendered."""
        return not is_trained_on_text(self.file) and self.reader.has_template

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The tokens of prompts on which to compare models, as `generate` encodes them."""
        reader = self.reader
        if not reader.renders_prompts:  # two models can be compared on any tokens
            reader = reader.with_options(replace(self.trained.reading_config(), template="chatml"))
        prompts = []
        for text in _PROMPTS:
            row = {"messages": [{"role": "user", "content": text}]}
            prompt = prompt_of(reader.encoder, row, f"{self.folder}: a prompt of the proof")
            prompts.append(list(prompt.ids))
        if not all(prompts):
            raise ModelError(f"{self.folder}: its tokenizer gives no tokens for text")
        return prompts


@dataclass(frozen=True)
class ExportResult:
    """The written folder, and the certificate of its comparison with the trained model."""

    output: Path
    certificate: Certificate


def find_source(config: OutgoingConfig) -> TrainedAdapter:
    """Return the adapter and base model that the options name. Raises ModelError."""
    file = AdapterFile.find(config.adapter)
    plain = BaseOptions(trust_remote_code=config.trust_remote_code)
    folder = find_base(config, file)
    attach.check_base(file, folder, other_base=config.other_base)
    base = open_base(folder, "float32", plain)
    adapter = read_mlx_lm(file, projections_of(base.model))
    options = attach.base_options(file, folder, plain)
    console = RunConsole(quiet=config.quiet)
    warn_of_template(file, folder, console)
    return TrainedAdapter(config, console, folder, file, adapter, options)


@contextmanager
def output_folder(source: TrainedAdapter) -> Iterator[Path]:
    """Yield a temporary folder, and move it to --output if no error occurs.

    First reports a base that is quantised while loading. If a signal ends the process, the folder
    is removed; if the process is killed, the next `fuse` or `export` removes the folder. Raises
    OutputError.
    """
    config, console = source.config, source.console
    if (quantize := source.base_options.quantize) is not None:
        name = format_name(quantize, source.base_options.double_quant)
        console.say("Base", f"{source.folder}, quantised to {name} while loading, as in training")
    sources = [source.folder, source.file.path, source.file.path.parent]
    target, overwrite = config.output_path, config.overwrite
    for left in remove_unfinished():
        console.say("Removed", f"{left}, which a killed process left")
    with (
        interrupt_on_signal(),
        new_folder(target, sources, manifest=CERTIFICATE, overwrite=overwrite) as folder,
        noted(folder),
    ):
        yield folder


def load_source_base(source: TrainedAdapter) -> BaseModel:
    """Load the base that an adapter was trained on, for the proof. Raises ModelError."""
    return loading.load_base(source.folder, source.config.dtype, source.base_options)


def prove_export(
    source: TrainedAdapter,
    format: str,
    load: Callable[[], Any],
    *,
    rounding: str = "float32",
    everywhere: bool = False,
    weights: WeightCheck | None = None,
    exact: bool = True,
    retention: Retention | None = None,
) -> Certificate:
    """Compare the model that `load` returns with the trained one; return the certificate.

    `rounding` is the dtype of the written tensors; with `everywhere`, all weights were rounded to
    it. If `exact` is false, weights were quantised again, and the difference has no limit. Loads
    one model at a time. Raises OutputError if rounding does not explain the difference.
    """
    source.console.say("Proving", "running the trained model, then what was written")
    adapted = attach.load_adapted(load_source_base(source), source.file)
    reference = compare_logits.reference_of(
        adapted, source.prompts, rounding, everywhere=everywhere
    )
    del adapted
    allocator.release()
    comparison = compare_logits.compare_logits(load(), reference)
    allocator.release()
    certificate = Certificate(
        format=format,
        dtype=reference.dtype,
        tolerance=reference.tolerance if exact else None,
        effect=reference.effect,
        comparison=comparison,
        versions=versions(),
        weights=weights,
        retention=retention,
    )
    check(certificate, source.config.output_path)
    return certificate


def certify(source: TrainedAdapter, folder: Path, certificate: Certificate) -> ExportResult:
    """Write a folder's certificate, with the hashes of the files; return the result."""
    certificate = replace(certificate, files=hashes(folder))
    write_json(folder / CERTIFICATE, certificate.as_dict())
    return ExportResult(source.config.output_path, certificate)


def print_result(result: ExportResult, config: OutgoingConfig) -> None:
    if config.json:
        print_json(result.certificate.as_dict())
        return
    print_line(f"{'Wrote':<12}{result.output}: {', '.join(result.certificate.files)}")
    for line in result.certificate.lines():
        print_line(f"{'Proof':<12}{line}")


def write_fused(
    source: TrainedAdapter,
    folder: Path,
    *,
    dequantize: bool,
    text_only: bool,
    storage: Storage = AS_BASE,
    retention: Retention | None = None,
) -> tuple[Certificate, str]:
    """Write the fused model into a folder; return its certificate and the dtype of its weights.

    For `dequantize` and `storage`, see `fused_model`; for `text_only`, `write_model`. Raises a
    subclass of MlxTuneError.
    """
    config, base_options = source.config, source.base_options
    model, model_config = fusing.fused_model(source.fusion, dequantize=dequantize, storage=storage)
    exact = not fusing.updates_quantized(model, source.adapter)
    stored = fusing.stored_dtype(model)
    source.console.say("Writing", str(config.output_path))
    left_out = fusing.write_model(model, model_config, source.folder, folder, text_only=text_only)
    if left_out:
        source.console.warn(
            f"left out {pluralize(left_out, 'tensor')} for images or sound: the written model and "
            "its "
            "config.json are of text alone"
        )
    _write_template(source, folder)
    del model
    allocator.release()
    certificate = prove_export(
        source,
        "fused",
        lambda: loading.load_base(folder, config.dtype, base_options.as_stored).model,
        rounding=stored,
        everywhere=dequantize,
        weights=fusing.check_fused(source.fusion, folder, dequantize=dequantize, storage=storage),
        exact=exact,
        retention=retention,
    )
    return certificate, stored


def warn_of_end(source: TrainedAdapter) -> None:
    """Warn if the export's tool does not stop at the template's end of a turn."""
    if source.is_of_conversations:
        for kind, detail in source.reader.unknown_end_note.items():
            source.console.warn(f"{kind} ({detail}): {advice_on(kind)}")


def _write_template(source: TrainedAdapter, folder: Path) -> None:
    """Write the end token of training's chat template, and the template if the base model lacks it.

    Raises OutputError.
    """
    if not source.is_of_conversations:
        return
    _write_end(source, folder)
    if source.trained.merge_system:
        source.console.warn("no template merges system messages: generate with --merge-system")
    if (template := source.reader.written_template) is None:
        return
    write_file(folder / "chat_template.jinja", [template.encode()])
    with as_output_error(folder, "--output"):
        for other in folder.glob("additional_chat_templates/*.jinja"):
            remove_file(other)
    source.console.say("Template", "from training, not the base model's own")


def _write_end(source: TrainedAdapter, folder: Path) -> None:
    """Add the template's end of turn to the model's end tokens, if it is not one of them."""
    reader = source.reader
    if (end := reader.unknown_end) is None:
        return
    path = folder / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    write_json(path, values | {"eos_token_id": [*sorted(reader.tokenizer.eos_ids), end]})
    source.console.say("Template", f"answers end with token {end}, and so does generation")


def convert_to_gguf(
    source: TrainedAdapter, program: str, folder: Path, stored: str, remedy: str
) -> None:
    """Write a fused folder as GGUF, and check the weights of the GGUF. Raises OutputError."""
    source.console.say("Converting", f"with {program}")
    merged_gguf.convert(program, folder, stored, remedy)
    options = source.base_options.as_stored
    source.console.say("GGUF", merged_gguf.check_merged(folder, source.adapter, options))


@contextmanager
def noted(folder: Path) -> Iterator[None]:
    """Keep a note that this process is filling a folder, which has a temporary name.

    The note gives the folder's path and inode, and is locked while the process lives.
    """
    status = folder.stat()
    note = {"folder": str(folder.absolute()), "device": status.st_dev, "inode": status.st_ino}
    lock = None
    # Best effort: without a note, a killed process's folder is not cleaned up later.
    with suppress(OSError, LockHeldError):
        notes = user_cache() / _NOTES
        make_folder(notes)
        lock = Lock(notes / f"{secrets.token_hex(8)}.json", note)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def remove_unfinished() -> list[Path]:
    """Remove and return the incomplete folders that this user's killed processes left."""
    removed = []
    with suppress(OSError):
        for path in sorted((user_cache() / _NOTES).iterdir()):
            if holder_of(path) is not None:
                continue
            with suppress(OSError, ValueError, LookupError, TypeError):
                note = read_json(path)
                folder = Path(note["folder"])
                if _is_noted(folder, note["device"], note["inode"]):
                    discard(folder)
                    removed.append(folder)
            with suppress(OSError):
                remove_file(path)
    return removed


def _is_noted(folder: Path, device: object, inode: object) -> bool:
    if not (is_temporary(folder) and is_folder(folder)):
        return False
    status = folder.stat()
    return (status.st_dev, status.st_ino, status.st_uid) == (device, inode, os.geteuid())
