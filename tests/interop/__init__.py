"""Against the libraries of others. mlxtune comes first: it loads a fast BLAS before mlx."""

import mlxtune.backend  # noqa: F401
