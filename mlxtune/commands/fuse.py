"""`mlxtune fuse`: writes a model with an adapter merged into the weights, and tests the result."""

from pathlib import Path

from mlxtune.backend.adapters import fuse as fusing
from mlxtune.backend.adapters.formats import merged_gguf
from mlxtune.backend.adapters.storage import AS_BASE
from mlxtune.backend.models.model_folder import read_config
from mlxtune.backend.models.quantize import NF4, is_quantized
from mlxtune.commands.retention import choose_storage
from mlxtune.config import FuseConfig
from mlxtune.session.keywords import takes_options
from mlxtune.session.proof import (
    ExportResult,
    Source,
    certify,
    convert,
    find_source,
    output_folder,
    print_result,
    write_fused,
)


@takes_options(FuseConfig)
def fuse(config: FuseConfig) -> ExportResult:
    """Write a model with an adapter merged into the weights; compare it with the trained model.

    Raises a subclass of MlxTuneError, without writing the output folder.
    """
    source = find_source(config)
    fusing.check_copied(source.folder)
    with output_folder(source) as folder:
        dequantize = _dequantizes(config, source)
        storage, retention = (AS_BASE, None) if dequantize else choose_storage(config, source)
        certificate, stored = write_fused(
            source, folder, dequantize=dequantize, storage=storage, retention=retention
        )
        if config.gguf:
            _write_gguf(source, folder, stored)
        return certify(source, folder, certificate)


def _dequantizes(config: FuseConfig, source: Source) -> bool:
    """Return whether to dequantise the weights, as the options or the format require.

    Raises ModelError if --gguf is set but this model cannot be written as GGUF.
    """
    model = read_config(source.folder, trust_remote_code=config.trust_remote_code)
    if config.gguf:
        merged_gguf.check_convertible(model["model_type"], "--gguf")
    quantized = is_quantized(model) or source.base_options.quantize is not None
    if config.dequantize or not quantized:
        return config.dequantize
    if source.base_options.quantize == NF4:
        source.console.say("", "mlx-lm has no nf4: writing plain weights, as with --dequantize")
        return True
    if config.gguf:
        source.console.say("", "llama.cpp needs plain weights: writing them, as with --dequantize")
    return config.gguf


def _write_gguf(source: Source, folder: Path, stored: str) -> None:
    program = merged_gguf.converter()
    if program is None:
        source.console.warn(merged_gguf.advice(source.config.output_path, stored))
    else:
        convert(source, program, folder, stored, "leave out --gguf to write the folder alone")


def show(config: FuseConfig) -> None:
    print_result(fuse(config), config)
