"""Comparisons with other libraries. mlxtune must load first, with a fast BLAS for mlx."""

import mlxtune.backend  # noqa: F401
