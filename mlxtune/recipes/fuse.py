"""The recipe of `mlxtune fuse`: a model folder with the adapter in its weights, proved equal.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

from typing import Any

from mlxtune.config import FuseConfig
from mlxtune.setup.proof import ExportResult, ask, say_result


def fuse(config: FuseConfig) -> ExportResult:
    """Write a model folder with an adapter in its weights, and compare it with what was trained.

    Raises a child of MlxTuneError; nothing is left at the output then.
    """
    from mlxtune.backend.adapters import fuse as fusing
    from mlxtune.backend.model import memory
    from mlxtune.backend.model.quantize import NF4
    from mlxtune.core.machine.output_folder import check_apart, new_folder
    from mlxtune.core.runs.certificate import CERTIFICATE
    from mlxtune.setup.proof import certify, find_source, load_model, reference_of, say_base

    console = ask(config)
    source = find_source(config)
    say_base(source, console)
    plain = config.dequantize
    if source.quantization.get("quantize") == NF4 and not plain:
        plain = True
        console.say("", "mlx-lm knows no nf4: the weights written are plain, as by --dequantize")
    target, trust = config.output_path, config.trust_remote_code
    check_apart(target, [source.folder, source.weights, source.weights.parent])
    with new_folder(target, marker=CERTIFICATE, overwrite=config.overwrite) as folder:
        how: dict[str, Any] = {
            "dequantize": plain,
            "trust_remote_code": trust,
            "quantization": source.quantization,
        }
        model, model_config = fusing.fused_model(source.folder, source.adapter, **how)
        exact = not fusing.is_quantized(model, source.adapter)
        stored = fusing.stored_dtype(model)
        reference, dtype = reference_of(
            config,
            source,
            lambda prompts: console.say("Prompts", prompts),
            stored,
            everywhere=plain,
        )
        console.say("Writing", str(target))
        fusing.write_model(model, model_config, source.folder, folder)
        del model
        memory.release()
        console.say("Proving", "loading what was written")
        certificate = certify(
            config,
            "fused",
            folder,
            reference,
            dtype,
            lambda: load_model(config, folder).model,
            weights=fusing.check_fused(source.folder, folder, source.adapter, **how),
            exact=exact,
        )
    return ExportResult(target, certificate)


def show(config: FuseConfig) -> None:
    """Fuse, and print what the certificate says."""
    result = fuse(config)
    say_result(result, config, [f"mlx_lm.generate --model {result.output} --prompt 'Hello'"])
