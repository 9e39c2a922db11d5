"""Code that computes with mlx and mlx_lm. On Linux, importing this package loads a fast CPU BLAS,
and chooses the folder of the kernels that MLX compiles.

Outside this package, only the benchmark and the diagnosis import mlx or mlx_lm, and nothing imports
transformers. Importing this package raises ModelError if mlx is installed without its native
library, and ConfigError if too few files may be open.
"""

import os
import resource
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import mlxtune.hub  # noqa: F401, checks HF_ENDPOINT before mlx-lm imports the client of the hub
from mlxtune.core.files.scratch import use_private_folder
from mlxtune.core.files.writing import as_output_error
from mlxtune.core.machine.blas import load_blas
from mlxtune.core.machine.cuda import keep_kernels
from mlxtune.core.machine.machine_checks import INSTALL_LIBRARY
from mlxtune.errors import ConfigError, ModelError

# mlx_lm.utils calls setrlimit(RLIMIT_NOFILE, (2048, 4096)), which fails without permission.
_MAX_OPEN_FILES = 4096


def _check_library() -> None:
    """Raise ModelError if mlx lacks its native library, as the bare package mlx does on Linux."""
    spec = find_spec("mlx")
    folders = (
        []
        if spec is None
        else [
            Path(submodule_search_location)
            for submodule_search_location in spec.submodule_search_locations or ()
        ]
    )
    extension = any(any(folder.glob("core.*.so")) for folder in folders)
    if sys.platform == "linux" and extension:
        if not any((folder / "lib" / "libmlx.so").exists() for folder in folders):
            raise ModelError(f"MLX's library is not installed: {INSTALL_LIBRARY}")


def _check_open_files() -> None:
    """Raise ConfigError if mlx-lm could not set its limit on open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES // 2, _MAX_OPEN_FILES))
    except (ValueError, OSError) as error:
        raise ConfigError(
            [
                f"only {hard:,} files may be open at once, and mlx-lm asks for "
                f"{_MAX_OPEN_FILES:,}: allow more with ulimit -Hn {_MAX_OPEN_FILES}, or in the "
                "limits of the container"
            ]
        ) from error


_check_library()
with as_output_error(Path(os.environ.get("TMPDIR", "/tmp")), "TMPDIR"):
    use_private_folder()
keep_kernels()
BLAS = load_blas().name
if problem := load_blas().problem:
    warnings.warn(problem, RuntimeWarning, stacklevel=2)
_check_open_files()
# In a notebook without widgets, tqdm warns about progress bars that are never shown.
warnings.filterwarnings("ignore", "IProgress not found")
