"""Everything that touches mlx and mlx_lm. On Linux, importing it loads a fast BLAS for the CPU.

Nothing outside this package imports mlx, mlx_lm or transformers.
"""

import warnings

from mlxtune.backend.model.blas import BLAS as BLAS
from mlxtune.backend.model.open_files import check_limit

check_limit()
# In a notebook without widgets, tqdm warns of bars that nothing here shows.
warnings.filterwarnings("ignore", "IProgress not found")
