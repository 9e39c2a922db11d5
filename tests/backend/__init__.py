# This import loads a fast BLAS, and must come before any test module imports mlx.
import mlxtune.backend  # noqa: F401
