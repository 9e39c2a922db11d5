"""The operations that compute a step: what a device must offer, MLX's own, and the choice."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.device.default_device import on_cpu, rounding
from mlxtune.backend.forward.gates import replace_gates
from mlxtune.backend.forward.kernels.attention_trial import KernelsFor, kernels_for
from mlxtune.backend.forward.layer_calls import LayerPasses, Recompute
from mlxtune.backend.forward.loss import LinearHead, VocabularyBlocks, softmax_cross_entropies
from mlxtune.backend.models.mixers.replacements import MIXERS
from mlxtune.backend.workers.shards import shards_of
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.graph_memory import GraphMemory
from mlxtune.core.steps.memory_terms import MemoryUse

# The fixed cost of a micro-batch, in units of one token's time.
_CPU_COST, _GPU_COST = 80, 512


class Operations(Protocol):
    """The operations that compute a step on a device.

    `by_segments` says whether causal attention keeps the examples of a packed sequence separate,
    `lazy` whether building a graph computes nothing, and `joins` whether projections of the same
    input run together in training.
    """

    by_segments: bool
    lazy: bool
    joins: bool
    memory: MemoryUse

    def load(self) -> None:
        """Load libraries and kernels ahead of their first use."""

    def supports(self, dtype: mx.Dtype | None) -> bool:
        """Return whether the operations support hidden states of this dtype (None: unknown)."""

    def linear_head(self, dtype: mx.Dtype | None) -> LinearHead | None:
        """Return the blockwise loss of a single-matmul head; None if this dtype has none."""

    def prepare(self, model: nn.Module) -> Callable[[], None]:
        """Make a model compute with these operations; return a function that restores the model."""

    def attention_kernels(self, dtype: mx.Dtype | None) -> KernelsFor | None:
        """Return a function from a layer's heads to kernels around attention; None for none."""

    def cross_entropies(self, logits: mx.array, labels: mx.array) -> mx.array:
        """Return the losses, float32 (P,), in nats, for logits (P, V) and labels int32 (P,)."""

    def layer_passes(self, recompute: bool) -> LayerPasses | None:
        """Return an object that runs layers in less memory; None if MLX runs them as usual."""


def operations_of(execution: Execution) -> Operations:
    """Return an execution's operations, of which core knows only the memory use."""
    return cast(Operations, execution.operations)


class MlxOperations:
    """MLX's own operations, for any device; see `Operations`. `plain` leaves models unchanged."""

    by_segments = False
    lazy = True
    cross_entropies = staticmethod(softmax_cross_entropies)

    def __init__(self, memory: MemoryUse | None = None, *, plain: bool = False) -> None:
        self.memory: MemoryUse = memory or GraphMemory()
        self.plain = plain
        self.joins = not plain

    def load(self) -> None:
        """Do nothing: MLX is already loaded."""

    def supports(self, dtype: mx.Dtype | None) -> bool:
        """Return True: MLX computes in any dtype."""
        return True

    def linear_head(self, dtype: mx.Dtype | None) -> LinearHead | None:
        """Return the loss in blocks for float32, else None: MLX fuses the loss in 16 bits."""
        return VocabularyBlocks() if dtype == mx.float32 else None

    def prepare(self, model: nn.Module) -> Callable[[], None]:
        """Replace a model's mixers, experts and gates; return a function that restores them."""
        if self.plain:
            return lambda: None
        undo_mixers, undo_gates = MIXERS.apply(model), replace_gates(model)

        def undo() -> None:
            undo_gates()
            undo_mixers()

        return undo

    def attention_kernels(self, dtype: mx.Dtype | None) -> KernelsFor | None:
        """Return the choice of kernels around attention; None without kernels, or if plain."""
        return None if self.plain else kernels_for(dtype)

    def layer_passes(self, recompute: bool) -> Recompute | None:
        """Return passes that run layers again; None without `recompute`."""
        return Recompute() if recompute else None


def _cpu_operations() -> Any:
    """Return the operations of `backend/cpu`; None if the package lacks that folder."""
    try:
        from mlxtune.backend.cpu import CPU
    except ModuleNotFoundError as error:
        if error.name != "mlxtune.backend.cpu":
            raise
        return None
    return CPU


MLX, PLAIN = MlxOperations(), MlxOperations(plain=True)
CPU_OPERATIONS = _cpu_operations()


def best_execution(
    parameters: int, dtype: str = "float32", kind: str = "auto", model: nn.Module | None = None
) -> Execution:
    """Return the execution that measurements found fastest for the device, model size and dtype.

    `kind` is the value of `bench --execution`: auto, gpu, cpu or plain (the reference). Our CPU
    kernels need whole layers, not the parts that --parallel tensor gives a worker.
    """
    if model is not None and any(shards_of(module) > 1 for module in model.modules()):
        kind = "gpu"
    if kind == "plain":
        return Execution(PLAIN, separate_head=False, packs=False)
    if kind == "gpu" or (kind == "auto" and not on_cpu()):
        return Execution(MLX, fixed_cost=_GPU_COST, rounding=rounding())
    if CPU_OPERATIONS is not None and CPU_OPERATIONS.pay_off(parameters, getattr(mx, dtype), model):
        return Execution(CPU_OPERATIONS, fixed_cost=_CPU_COST)
    return Execution(MLX, fixed_cost=_CPU_COST)


def logits_dtype(model: nn.Module) -> str:
    """Return the dtype of a model's logits, without computing them."""
    return str(model(mx.zeros((1, 1), mx.int32)).dtype).removeprefix("mlx.core.")


def load_ahead(folder: Path) -> None:
    """Load the libraries that compute with a model, in a background thread.

    The size of the model's files decides which libraries are loaded.
    """
    size = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    # Most weights are stored in 16 bits.
    operations = operations_of(best_execution(size // 2))

    def load() -> None:
        # Errors surface at first real use.
        with suppress(Exception):
            operations.load()

    threading.Thread(target=load, daemon=True).start()
