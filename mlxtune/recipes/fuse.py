"""The recipe of `mlxtune fuse`: a model folder with the adapter in its weights, proved equal."""

from typing import Any

from mlxtune.backend.adapters import fuse as fusing
from mlxtune.backend.model import memory
from mlxtune.backend.model.loading import load_base
from mlxtune.backend.model.quantize import NF4
from mlxtune.config import FuseConfig
from mlxtune.setup.proof import ExportResult, find_source, output_folder, print_result, prove
from mlxtune.setup.retention import choose_storage
from mlxtune.terminal.console import RunConsole


def fuse(config: FuseConfig) -> ExportResult:
    """Write a model folder with an adapter in its weights, and compare it with what was trained.

    Raises a child of MlxTuneError; the output folder is then not written.
    """
    console = RunConsole(quiet=config.quiet)
    source, trust = find_source(config), config.trust_remote_code
    fusing.check_links(source.folder)
    with output_folder(config, source, console) as folder:
        options: dict[str, Any] = {
            "dequantize": config.dequantize,
            "trust_remote_code": trust,
            "quantization": source.quantization,
        }
        if source.quantization.get("quantize") == NF4 and not config.dequantize:
            options["dequantize"] = True
            console.say("", "mlx-lm has no nf4: writing plain weights, as with --dequantize")
        retention = None
        if not options["dequantize"]:
            options["storage"], retention = choose_storage(config, source, console)
        model, model_config = fusing.fused_model(source.folder, source.adapter, **options)
        exact = not fusing.is_quantized(model, source.adapter)
        stored = fusing.stored_dtype(model)
        console.say("Writing", str(config.output_path))
        fusing.write_model(model, model_config, source.folder, folder)
        del model
        memory.release()
        return prove(
            config,
            source,
            console,
            "fused",
            folder,
            lambda: load_base(folder, config.dtype, trust_remote_code=trust).model,
            rounding=stored,
            everywhere=options["dequantize"],
            weights=fusing.check_fused(source.folder, folder, source.adapter, **options),
            exact=exact,
            retention=retention,
        )


def show(config: FuseConfig) -> None:
    """Fuse, and print the certificate."""
    print_result(fuse(config), config)
