"""The recipe of `mlxtune import`: an adapter of mlx-lm or PEFT, as training and generating take it.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlxtune.config import ImportConfig, as_path
from mlxtune.errors import ModelError, printable


def import_adapter(config: ImportConfig) -> Path:
    """Write an adapter of mlx-lm or PEFT in mlx-lm's layout; return the adapter's file.

    Its names and shapes are compared with the base model, of which no weight is read. Raises
    ModelError, naming what LoRA in mlx-lm has no place for, or OutputError.
    """
    import mlxtune.backend  # noqa: F401  a fast BLAS, before anything imports mlx
    from mlxtune.backend.adapters.formats import names
    from mlxtune.backend.adapters.formats.adapter import completed
    from mlxtune.backend.adapters.formats.mlx_lm import read_mlx_lm, write_mlx_lm
    from mlxtune.backend.adapters.formats.peft import base_of, read_peft
    from mlxtune.backend.model.loading import open_base
    from mlxtune.core.machine.output_folder import check_apart, new_folder
    from mlxtune.core.training.checkpoint import ADAPTER
    from mlxtune.setup.proof import find_base

    given, is_peft = _find(config.adapter)
    named = base_of(given.parent) if is_peft else read_mlx_lm(given).model
    folder = find_base(config, named, str(given.parent), str(given))
    base = open_base(folder, "float32", trust_remote_code=config.trust_remote_code)
    modules = names.projections_of(base.model)
    layers = base.num_layers
    found = read_peft(given.parent, modules, layers) if is_peft else read_mlx_lm(given)
    adapter = replace(completed(found, modules), model=config.model_path or named)
    target = config.output_path
    check_apart(target, [folder, given, given.parent])
    with new_folder(target, marker=ADAPTER, overwrite=config.overwrite) as temporary:
        write_mlx_lm(adapter, temporary)
    return target / ADAPTER


def show(config: ImportConfig) -> None:
    """Import, and print what was written and how it is used."""
    path = import_adapter(config)
    print(printable(f"{'Wrote':<12}{path} and adapter_config.json beside it"))


def _find(path: str) -> tuple[Path, bool]:
    """Return the file of weights that a path means, and whether it is PEFT's. Raises ModelError."""
    from mlxtune.backend.adapters.formats.peft import PICKLED, WEIGHTS
    from mlxtune.core.training.checkpoint import ADAPTER

    given = as_path(path)
    for candidate in (given, given / WEIGHTS, given / ADAPTER):
        if candidate.is_file() and candidate.name != PICKLED:
            if candidate.suffix != ".safetensors":
                raise ModelError(f"{candidate}: is no safetensors file: name the adapter's folder")
            return candidate, candidate.name == WEIGHTS
    if given.name == PICKLED or (given / PICKLED).is_file():
        raise ModelError(
            f"{given}: has {PICKLED}, which may run code when it is read: load it with PEFT where "
            "you trust it, and save it by save_pretrained, which writes safetensors"
        )
    raise ModelError(f"{given}: holds neither {WEIGHTS} of PEFT nor {ADAPTER} of mlx-lm")
