"""`mlxtune import`: converts an adapter of mlx-lm or PEFT to the layout of `train`."""

from dataclasses import replace
from pathlib import Path

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.file_formats.adapter import completed
from mlxtune.backend.adapters.file_formats.mlx_lm import read_mlx_lm, write_mlx_lm
from mlxtune.backend.adapters.file_formats.peft import (
    PICKLED_WEIGHTS,
    WEIGHTS,
    base_of,
    read_peft,
    read_peft_config,
)
from mlxtune.backend.lora.targets import projections_of
from mlxtune.backend.models.loading import open_base
from mlxtune.config import ImportConfig, as_path
from mlxtune.config.data_config import BaseOptions
from mlxtune.core.files.output_folder import hashes, new_folder
from mlxtune.core.files.writing import write_json
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.errors import ModelError
from mlxtune.session.arguments import takes_options
from mlxtune.session.trained_model import find_named_base
from mlxtune.views.output import print_line

# Lists the SHA-256 of each written file; --overwrite replaces only the listed files.
FILES = "mlxtune-files.json"


@takes_options(ImportConfig)
def import_adapter(config: ImportConfig) -> Path:
    """Write an adapter of mlx-lm or PEFT in mlx-lm's layout; return the path of the written file.

    Names and shapes are checked against the base model, whose weights are not read. Raises
    ModelError, which names any parts that mlx-lm's LoRA cannot represent, or OutputError.
    """
    source, is_peft = _find(config.adapter)
    file = AdapterFile(source)
    of_peft = read_peft_config(source.parent) if is_peft else None
    named = file.info.model if of_peft is None else base_of(of_peft)
    folder = find_named_base(config, file, named, str(source.parent))
    options = BaseOptions(trust_remote_code=config.trust_remote_code)
    base = open_base(folder, "float32", options)
    modules = projections_of(base.model)
    adapter = (
        read_mlx_lm(file, modules)
        if of_peft is None
        else read_peft(source.parent, of_peft, modules, base.model_type)
    )
    adapter = replace(completed(adapter, modules), model=config.model_path or named)
    target, sources = config.output_path, [folder, source, source.parent]
    with new_folder(target, sources, manifest=FILES, overwrite=config.overwrite) as temporary:
        write_mlx_lm(adapter, temporary / ADAPTER)
        write_json(temporary / FILES, {"files": hashes(temporary)})
    return target / ADAPTER


def main(config: ImportConfig) -> None:
    path = import_adapter(config)
    print_line(f"{'Wrote':<12}{path} and adapter_config.json beside it")


def _find(path: str) -> tuple[Path, bool]:
    """Return an adapter's weights file, and whether PEFT wrote it. Raises ModelError."""
    source = as_path(path)
    for candidate in (source, source / WEIGHTS, source / ADAPTER):
        if candidate.is_file() and candidate.name != PICKLED_WEIGHTS:
            if candidate.suffix != ".safetensors":
                raise ModelError(f"{candidate}: not a safetensors file: name the adapter's folder")
            return candidate, candidate.name == WEIGHTS
    if source.name == PICKLED_WEIGHTS or (source / PICKLED_WEIGHTS).is_file():
        raise ModelError(
            f"{source} holds {PICKLED_WEIGHTS}, which can run code when it is loaded: if you trust "
            "it, load it with PEFT and save it with save_pretrained, which writes safetensors"
        )
    raise ModelError(f"{source} holds neither PEFT's {WEIGHTS} nor mlx-lm's {ADAPTER}")
