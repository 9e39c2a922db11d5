"""Everything that touches mlx and mlx_lm. On Linux, importing it loads a fast BLAS for the CPU.

Nothing outside this package imports mlx, mlx_lm or transformers.
"""

from mlxtune.backend.model.blas import BLAS as BLAS
