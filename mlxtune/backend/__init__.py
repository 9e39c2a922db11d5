"""Everything that touches mlx and mlx_lm. On Linux, importing it loads a fast BLAS for the CPU.

Nothing outside this package imports mlx, mlx_lm or transformers.
"""

from mlxtune.backend.model.blas import BLAS as BLAS
from mlxtune.backend.model.open_files import check_limit

check_limit()
