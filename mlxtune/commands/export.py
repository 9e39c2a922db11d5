"""`mlxtune export`: an adapter in another tool's format, proved equal."""

from functools import partial
from pathlib import Path
from typing import Any

from mlxtune.backend.adapters.attach import load_adapted
from mlxtune.backend.adapters.formats import flat, gguf, mlx_lm, peft
from mlxtune.backend.adapters.formats.adapter import completed
from mlxtune.backend.lora.targets import projections_of
from mlxtune.backend.models.loading import open_base
from mlxtune.commands.prepare.keywords import takes_options
from mlxtune.commands.proof import (
    ExportResult,
    Source,
    find_source,
    load_base,
    output_folder,
    print_result,
    prove,
)
from mlxtune.config import ExportConfig
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.run.checkpoint import ADAPTER


@takes_options(ExportConfig)
def export(config: ExportConfig) -> ExportResult:
    """Write an adapter in a format, load it again, and compare it with the trained model.

    Raises a child of MlxTuneError; the output folder is then not written.
    """
    source = find_source(config)
    with output_folder(source) as folder:
        # The adapter is written first: that fails at once if the format cannot hold it.
        _write(config, source, folder)
        load = partial(_load, config, source, folder)
        return prove(source, config.format, folder, load)


def show(config: ExportConfig) -> None:
    print_result(export(config), config)


def _write(config: ExportConfig, source: Source, folder: Path) -> None:
    if config.format == "mlx-lm":
        mlx_lm.copy_mlx_lm(source.weights, folder)
    elif config.format == "peft":
        peft.write_peft(source.adapter, source.folder, folder)
    elif config.format == "flat":
        metadata = {name: source.metadata.get(name) for name in ("epoch", "val_loss")}
        flat.write_flat(source.adapter, folder, metadata)
    else:
        trust = config.trust_remote_code
        base = open_base(
            source.folder, config.dtype, trust_remote_code=trust, **source.quantization
        )
        gguf.write_gguf(source.adapter, base, folder)


def _load(config: ExportConfig, source: Source, folder: Path) -> Any:
    """Return a fresh base model with the adapter of a folder, in any of the formats."""
    base = load_base(source)
    if config.format == "mlx-lm" and source.adapter.is_dora and base.quantize == "nf4":
        # mlx-lm's DoRA unpacks the base by MLX's functions, which do not support nf4.
        return load_adapted(base, str(folder)).model
    if config.format == "mlx-lm":
        return mlx_lm.load_with_mlx_lm(base.model, folder)
    modules = projections_of(base.model)
    if config.format == "peft":
        adapter = peft.read_peft(folder, modules, base.model_type)
    elif config.format == "flat":
        adapter = flat.read_flat(folder, modules)
    else:
        adapter = gguf.read_gguf(folder, modules, base)
    with scratch_folder() as scratch:
        mlx_lm.write_mlx_lm(completed(adapter, modules), scratch / ADAPTER)
        return load_adapted(base, str(scratch)).model
