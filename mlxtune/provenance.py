"""What a result depends on beside options and data: the base model, versions, the folder.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxtune.backend.model import BaseModel
    from mlxtune.core.model_files import ModelHash


def provenance_of(base: BaseModel, model_hash: ModelHash) -> dict[str, Any]:
    """Return what a result depends on beside options and data."""
    return {
        "model_type": base.model_type,
        "dtype": base.dtype,
        "quantized_compute": base.quantized_compute,
        "base_hash": model_hash.result(),
        "versions": versions(),
        "working_directory": str(Path.cwd()),
    }


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import importlib.metadata

    packages = ("mlxtune", "mlx", "mlx-lm", "transformers", "numpy")
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in packages
    }
