"""Everything that touches mlx and mlx_lm. On Linux, importing it loads a fast BLAS for the CPU.

Nothing outside this package imports mlx, mlx_lm or transformers. Raises ModelError where mlx is
installed without the library that computes.
"""

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from mlxtune.backend.device.open_files import check_limit
from mlxtune.core.machine.blas import load_blas
from mlxtune.core.machine.checks import INSTALL_LIBRARY
from mlxtune.errors import ModelError


def _check_library() -> None:
    """Raise ModelError if mlx has no library: on Linux, the package mlx alone brings none."""
    spec = find_spec("mlx")
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    extension = any(any(folder.glob("core.*.so")) for folder in folders)
    if sys.platform == "linux" and extension:
        if not any((folder / "lib" / "libmlx.so").exists() for folder in folders):
            raise ModelError(f"MLX has no library here: {INSTALL_LIBRARY}")


_check_library()
BLAS = load_blas().name
if problem := load_blas().problem:
    warnings.warn(problem, RuntimeWarning, stacklevel=2)
check_limit()
# In a notebook without widgets, tqdm warns of bars that nothing here shows.
warnings.filterwarnings("ignore", "IProgress not found")
