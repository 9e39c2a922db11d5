"""`mlxtune fuse`: a model folder with the adapter in its weights, proved equal."""

from pathlib import Path
from typing import Any

from mlxtune.backend.adapters import fuse as fusing
from mlxtune.backend.adapters.formats import merged_gguf
from mlxtune.backend.device import memory
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.models.model_folder import read_config
from mlxtune.backend.models.quantize import NF4, is_quantized
from mlxtune.commands.prepare.keywords import takes_options
from mlxtune.commands.proof import (
    ExportResult,
    Source,
    find_source,
    output_folder,
    print_result,
    prove,
)
from mlxtune.commands.retention import choose_storage
from mlxtune.config import FuseConfig


@takes_options(FuseConfig)
def fuse(config: FuseConfig) -> ExportResult:
    """Write a model folder with an adapter in its weights, and compare it with the trained model.

    Raises a child of MlxTuneError; the output folder is then not written.
    """
    source, trust = find_source(config), config.trust_remote_code
    console = source.console
    fusing.check_copied(source.folder)
    with output_folder(source) as folder:
        options: dict[str, Any] = {
            "dequantize": _dequantizes(config, source),
            "trust_remote_code": trust,
            "quantization": source.quantization,
        }
        retention = None
        if not options["dequantize"]:
            options["storage"], retention = choose_storage(config, source)
        model, model_config = fusing.fused_model(source.folder, source.adapter, **options)
        exact = not fusing.is_quantized(model, source.adapter)
        stored = fusing.stored_dtype(model)
        console.say("Writing", str(config.output_path))
        fusing.write_model(model, model_config, source.folder, folder)
        del model
        memory.release()
        if config.gguf:
            _write_gguf(config, source, folder, stored)
        return prove(
            source,
            "fused",
            folder,
            lambda: load_base(folder, config.dtype, trust_remote_code=trust).model,
            rounding=stored,
            everywhere=options["dequantize"],
            weights=fusing.check_fused(source.folder, folder, source.adapter, **options),
            exact=exact,
            retention=retention,
        )


def _dequantizes(config: FuseConfig, source: Source) -> bool:
    """Return whether plain weights are written, as asked or because their readers need them.

    Raises ModelError if --gguf cannot be done for this model.
    """
    model = read_config(source.folder, trust_remote_code=config.trust_remote_code)
    if config.gguf:
        merged_gguf.check_convertible(model["model_type"])
    quantized = is_quantized(model) or bool(source.quantization)
    if config.dequantize or not quantized:
        return config.dequantize
    if source.quantization.get("quantize") == NF4:
        source.console.say("", "mlx-lm has no nf4: writing plain weights, as with --dequantize")
        return True
    if config.gguf:
        source.console.say("", "llama.cpp reads plain weights: writing these, as with --dequantize")
    return config.gguf


def _write_gguf(config: FuseConfig, source: Source, folder: Path, stored: str) -> None:
    console = source.console
    program = merged_gguf.converter()
    if program is None:
        console.warn(merged_gguf.advice(config.output_path, stored))
        return
    console.say("Converting", f"with {program}")
    merged_gguf.convert(program, folder, stored)
    trust = config.trust_remote_code
    found = merged_gguf.check_merged(folder, source.adapter, trust_remote_code=trust)
    console.say("GGUF", found)


def show(config: FuseConfig) -> None:
    print_result(fuse(config), config)
