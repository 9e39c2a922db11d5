"""The CPU's operations: matmuls by numpy's BLAS, and kernels that numba compiles.

This folder is optional: `forward.operations` uses `CPU` if the folder exists. numba and the modules
that use it are imported at first use: the import takes a long time, and only the extra `cpu`
installs numba, on Linux.
"""

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rwkv7 import Rwkv7TimeMixing

from mlxtune.backend.cpu.kernel_layers import KernelLayers, KernelMemory
from mlxtune.backend.lora.targets import EXPERTS

# In models with at least this many parameters, kernels save more time than their calls cost.
_MIN_KERNEL_PARAMETERS = 10_000_000
# Modules that reveal experts or recurrences, which have no kernels.
_UNSUPPORTED_MODULES = (*EXPERTS, nn.Conv1d, Rwkv7TimeMixing)


class CpuOperations:
    """The CPU's operations; see `Operations`."""

    by_segments = True
    lazy = False
    joins = False
    memory = KernelMemory()

    def load(self) -> None:
        """Import numba and the kernels."""
        from mlxtune.backend.cpu import numba_kernels

        numba_kernels.widen(0, 1, np.zeros((1, 1), np.uint16), np.zeros((1, 1), np.uint32))

    def supports(self, dtype: mx.Dtype | None) -> bool:
        """Return whether the dtype is float32, the only dtype of the kernels."""
        return dtype is not None and dtype == mx.float32

    def pay_off(self, parameters: int, dtype: mx.Dtype, model: nn.Module | None) -> bool:
        """Return whether the kernels are installed, and train such a base faster than MLX does.

        They do not if layers have recurrences or experts, which MLX's operations compute: each
        layer is evaluated as it runs, so all values of these operations would stay in memory.
        """
        # The extra `cpu` installs these packages.
        installed = all(map(find_spec, ("numba", "threadpoolctl")))
        modules = [] if model is None else [m for layer in model.layers for m in layer.modules()]
        is_dense = not any(isinstance(module, _UNSUPPORTED_MODULES) for module in modules)
        return (
            parameters >= _MIN_KERNEL_PARAMETERS and installed and self.supports(dtype) and is_dense
        )

    def linear_head(self, dtype: mx.Dtype | None) -> ModuleType:
        """Return the module that computes cross-entropy in blocks of the vocabulary."""
        from mlxtune.backend.cpu import blas_matmuls

        return blas_matmuls

    def prepare(self, model: nn.Module) -> Callable[[], None]:
        """Make a model compute with the kernels; return a function that undoes the change."""
        from mlxtune.backend.cpu.arrays import unshared_matmuls
        from mlxtune.backend.cpu.fast_model import make_fast

        undo_model, undo_matmuls = make_fast(model), unshared_matmuls()

        def undo() -> None:
            undo_matmuls()
            undo_model()

        return undo

    def attention_kernels(self, dtype: mx.Dtype | None) -> None:
        """Return None: attention runs on the sequence itself."""

    def cross_entropies(self, logits: mx.array, labels: mx.array) -> mx.array:
        """Return the cross-entropy (P,) of logits (P, V) against labels (P,)."""
        return self.linear_head(mx.float32).losses(logits, labels)

    def layer_passes(self, recompute: bool) -> KernelLayers:
        """Return passes that keep each layer's products or, with `recompute`, only its inputs."""
        return KernelLayers(keep_matmuls=not recompute)


CPU = CpuOperations()
