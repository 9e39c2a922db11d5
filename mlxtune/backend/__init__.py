"""Everything that touches mlx and mlx_lm. Importing it makes the CPU fast first, where it is used.

Nothing outside this package imports mlx, mlx_lm or transformers.
"""

from mlxtune.backend.model.blas import BLAS as BLAS
