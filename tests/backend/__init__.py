# Before any test module imports mlx: it loads a fast BLAS.
import mlxtune.backend  # noqa: F401
