"""`mlxtune export`: writes an adapter in another tool's format, and tests the result."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import load_adapted
from mlxtune.backend.adapters.certificate import Certificate
from mlxtune.backend.adapters.file_formats import flat, gguf, merged_gguf, mlx_lm, peft
from mlxtune.backend.adapters.file_formats.adapter import completed
from mlxtune.backend.adapters.fusing import check_copied
from mlxtune.backend.lora.targets import projections_of
from mlxtune.backend.models.loading import open_base
from mlxtune.config import ExportConfig
from mlxtune.core.files.ours import discard, move
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.files.writing import make_folder
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.session import verified_output
from mlxtune.session.arguments import takes_options


@takes_options(ExportConfig)
def export(config: ExportConfig) -> verified_output.ExportResult:
    """Write an adapter for another tool, load it, and compare the result with the trained model.

    Raises a subclass of MlxTuneError, without writing the output folder.
    """
    source = verified_output.find_source(config)
    with verified_output.output_folder(source) as folder:
        # Writing the adapter first fails early if the format does not support the adapter.
        if config.merge:
            return verified_output.certify(source, folder, _merge(config, source, folder))
        _write(config, source, folder)
        verified_output.warn_of_end(source)
        load = partial(_load_exported, config, source, folder)
        return verified_output.certify(
            source, folder, verified_output.prove_export(source, config.format, load)
        )


def main(config: ExportConfig) -> None:
    verified_output.print_result(export(config), config)


def _merge(
    config: ExportConfig, source: verified_output.TrainedAdapter, folder: Path
) -> Certificate:
    """Merge base and adapter into a GGUF file or, without llama.cpp's converter, a model folder.

    The output folder also gets a Modelfile for Ollama. The proof covers the weights before
    quantisation.
    """
    console = source.console
    check_copied(source.folder)
    converter, quantizer = merged_gguf.converter(), merged_gguf.find_quantizer()
    if converter is not None:
        merged_gguf.check_convertible(source.model_config["model_type"], "--merge")
    if converter is None or (config.quantize and quantizer is None):
        output = (config.output_path, config.quantize)
        console.warn(merged_gguf.ollama_advice(*output, converted=converter is not None))
    merged = folder if converter is None else folder / "merged"
    make_folder(merged)
    certificate, stored = verified_output.write_fused(
        source, merged, dequantize=source.has_quantized_base, text_only=True
    )
    if converter is not None:
        verified_output.convert_to_gguf(
            source, converter, merged, stored, "use mlxtune fuse to write a model folder"
        )
        certificate = replace(certificate, format="gguf")
        written, target = merged / merged_gguf.MERGED_MODEL, folder / merged_gguf.MERGED_MODEL
        if config.quantize and quantizer is not None:
            console.say("Quantising", f"to {config.quantize} with {quantizer}")
            merged_gguf.quantize_gguf(quantizer, written, target, config.quantize)
            certificate = replace(certificate, quantized=config.quantize)
        else:
            move(written, target)
        discard(merged)
    merged_gguf.write_modelfile(folder)
    return certificate


def _write(config: ExportConfig, source: verified_output.TrainedAdapter, folder: Path) -> None:
    if config.format == "mlx-lm":
        mlx_lm.copy_mlx_lm(source.file, folder / ADAPTER)
    elif config.format == "peft":
        peft.write_peft(source.adapter, source.folder, folder)
    elif config.format == "flat":
        metadata = {name: source.file.origin.metadata.get(name) for name in ("epoch", "val_loss")}
        flat.write_flat(source.adapter, folder, metadata)
    else:
        base = open_base(source.folder, config.dtype, source.base_options)
        gguf.write_gguf(source.adapter, base, folder)


def _load_exported(
    config: ExportConfig, source: verified_output.TrainedAdapter, folder: Path
) -> Any:
    """Load the base model again, with the adapter that was exported to a folder."""
    base = verified_output.load_source_base(source)
    if config.format == "mlx-lm" and source.adapter.is_dora and base.quantize == "nf4":
        # mlx-lm's DoRA unpacks the base with MLX's functions, which do not support nf4.
        return load_adapted(base, AdapterFile(folder / ADAPTER)).model
    if config.format == "mlx-lm":
        return mlx_lm.load_with_mlx_lm(base.model, folder)
    modules = projections_of(base.model)
    if config.format == "peft":
        adapter = peft.read_peft(folder, peft.read_peft_config(folder), modules, base.model_type)
    elif config.format == "flat":
        adapter = flat.read_flat(folder, modules)
    else:
        adapter = gguf.read_gguf(folder, modules, base)
    with scratch_folder() as scratch:
        mlx_lm.write_mlx_lm(completed(adapter, modules), scratch / ADAPTER)
        return load_adapted(base, AdapterFile(scratch / ADAPTER)).model
