"""The recipe of `mlxtune export`: an adapter in another tool's format, proved equal.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxtune.config import ExportConfig
from mlxtune.setup.proof import ExportResult, ask, say_result

if TYPE_CHECKING:
    from mlxtune.backend.adapters.formats.adapter import Adapter
    from mlxtune.backend.model.loading import BaseModel
    from mlxtune.setup.proof import Source


def export(config: ExportConfig) -> ExportResult:
    """Write an adapter in a format, load it again, and compare it with what was trained.

    Raises a child of MlxTuneError; nothing is left at the output then.
    """
    from mlxtune.core.machine.output_folder import check_apart, new_folder
    from mlxtune.core.runs.certificate import CERTIFICATE
    from mlxtune.setup.proof import certify, find_source, reference_of, say_base

    console = ask(config)
    source = find_source(config)
    say_base(source, console)
    target = config.output_path
    check_apart(target, [source.folder, source.weights, source.weights.parent])
    with new_folder(target, marker=CERTIFICATE, overwrite=config.overwrite) as folder:
        # First, as it fails at once where the format has no place for the adapter.
        _write(config, source, folder)
        reference, dtype = reference_of(
            config, source, lambda prompts: console.say("Prompts", prompts)
        )
        console.say("Proving", "loading what was written")
        load = partial(_load, config, source, folder)
        certificate = certify(config, config.format, folder, reference, dtype, load)
    return ExportResult(target, certificate)


def show(config: ExportConfig) -> None:
    """Export, and print what the certificate says and how the result is used."""
    from mlxtune.setup.proof import find_source

    result = export(config)
    base = shlex.quote(str(config.model_path or find_source(config).adapter.model))
    output = shlex.quote(str(result.output))
    usage = {
        "mlx-lm": [f"mlx_lm.generate --model {base} --adapter-path {output} --prompt 'Hello'"],
        "peft": [
            f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {output!r})"
        ],
        "gguf": [
            f"llama-cli -m BASE.gguf --lora {output}/adapter.gguf",
            "or in Ollama's Modelfile, where BASE is the same model:",
            "FROM BASE",
            f"ADAPTER {result.output.absolute()}/adapter.gguf",
        ],
        "flat": [],
    }
    say_result(result, config, usage[config.format])


def _write(config: ExportConfig, source: Source, folder: Path) -> None:
    from mlxtune.backend.adapters.formats import flat, gguf, mlx_lm, peft
    from mlxtune.backend.model.loading import open_base

    if config.format == "mlx-lm":
        mlx_lm.copy_mlx_lm(source.weights, folder)
    elif config.format == "peft":
        peft.write_peft(source.adapter, source.folder, folder)
    elif config.format == "flat":
        said = {name: source.metadata.get(name) for name in ("epoch", "val_loss")}
        flat.write_flat(source.adapter, folder, said)
    else:
        trust = config.trust_remote_code
        how = source.quantization
        base = open_base(source.folder, config.dtype, trust_remote_code=trust, **how)
        of = (base.model_type, base.text_config, base.num_layers)
        gguf.write_gguf(source.adapter, *of, folder)


def _load(config: ExportConfig, source: Source, folder: Path) -> Any:
    """Return a fresh base model with the adapter that a folder holds, in any of the formats."""
    import tempfile

    from mlxtune.backend.adapters.attach import load_adapted
    from mlxtune.backend.adapters.formats import mlx_lm, names
    from mlxtune.backend.adapters.formats.adapter import completed
    from mlxtune.setup.proof import load_base_of

    base = load_base_of(config, source)
    if config.format == "mlx-lm" and source.adapter.is_dora and base.quantize == "nf4":
        # mlx-lm's DoRA unpacks a base by MLX's functions, which know no nf4.
        return load_adapted(base, str(folder)).model
    if config.format == "mlx-lm":
        return mlx_lm.load_with_mlx_lm(base.model, folder)
    with tempfile.TemporaryDirectory(prefix="mlxtune-") as scratch:
        modules = names.projections_of(base.model)
        adapter = completed(_read_back(config, base, folder), modules)
        mlx_lm.write_mlx_lm(adapter, Path(scratch))
        return load_adapted(base, scratch).model


def _read_back(config: ExportConfig, base: BaseModel, folder: Path) -> Adapter:
    from mlxtune.backend.adapters.formats import flat, gguf, names, peft

    modules, layers = names.projections_of(base.model), base.num_layers
    if config.format == "peft":
        return peft.read_peft(folder, modules, layers)
    if config.format == "flat":
        return flat.read_flat(folder, modules, layers)
    return gguf.read_gguf(folder, modules, base.model_type, base.text_config, layers)
