"""Comparisons with other libraries. Import mlxtune first: it loads a fast BLAS before mlx."""

import mlxtune.backend  # noqa: F401
