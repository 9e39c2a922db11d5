"""The common part of `fuse` and `export --merge`: a fused folder, proved, and its GGUF, checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxtune.backend.adapters import fuse as fusing
from mlxtune.backend.adapters.certificate import Certificate
from mlxtune.backend.adapters.formats import merged_gguf
from mlxtune.backend.adapters.retention import Retention
from mlxtune.backend.device import memory
from mlxtune.backend.models.loading import load_base
from mlxtune.commands.proof import Source, prove


def write_fused(
    source: Source, folder: Path, options: Mapping[str, Any], retention: Retention | None = None
) -> tuple[Certificate, str]:
    """Write the fused model into a folder; return its proof, and the dtype that it is stored in.

    `options` are `fused_model`'s. Raises a child of MlxTuneError.
    """
    config = source.config
    trust = config.trust_remote_code
    model, model_config = fusing.fused_model(source.folder, source.adapter, **options)
    exact = not fusing.is_quantized(model, source.adapter)
    stored = fusing.stored_dtype(model)
    source.console.say("Writing", str(config.output_path))
    fusing.write_model(model, model_config, source.folder, folder)
    del model
    memory.release()
    certificate = prove(
        source,
        "fused",
        lambda: load_base(folder, config.dtype, trust_remote_code=trust).model,
        rounding=stored,
        everywhere=options["dequantize"],
        weights=fusing.check_fused(source.folder, folder, source.adapter, **options),
        exact=exact,
        retention=retention,
    )
    return certificate, stored


def convert(source: Source, program: str, folder: Path, stored: str, remedy: str) -> None:
    """Write a fused folder as GGUF, and check its weights. Raises OutputError."""
    console, trust = source.console, source.config.trust_remote_code
    console.say("Converting", f"with {program}")
    merged_gguf.convert(program, folder, stored, remedy)
    found = merged_gguf.check_merged(folder, source.adapter, trust_remote_code=trust)
    console.say("GGUF", found)
