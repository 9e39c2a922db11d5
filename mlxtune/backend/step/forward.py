"""The loss of a micro-batch, on the shortest way that is exact for the model."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.cpu.packed import Layout, PackedCache, laid_out
from mlxtune.backend.lora.layers import DropoutKeys
from mlxtune.backend.model.device import on_cpu
from mlxtune.backend.step.head import SplitModel
from mlxtune.backend.step.loss import (
    cross_entropies,
    cross_entropy_sum,
    fused_losses,
    head_loss_sum,
    head_losses,
)
from mlxtune.backend.step.prefix import PrefixCache
from mlxtune.backend.step.recompute import Layerwise
from mlxtune.core.steps.batch import MicroBatch
from mlxtune.core.steps.pack import Pack

# Supervised positions are padded to a multiple of it where shapes are compiled.
_POSITIONS_MULTIPLE = 64
# Parameters from which on the CPU's kernels gain more than it takes to call them.
_LARGE_MODEL = 10_000_000

# The loss of the rows of hidden states (P, H) at the supervised positions.
Head = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Execution:
    """How a step is computed. Nothing here changes its loss or gradient beyond float rounding.

    `split_head`: run the head on supervised positions alone, `loss_chunk` of them at a time.
    `share_prefixes`: run what examples begin with once. `pack`: lay examples end to end in one line
    instead of padding them, with `cpu_kernels` alone. `recompute`: keep only the input of each
    layer and run it again in the backward pass. `cpu_kernels`: use the CPU's own room, in float32.
    `compile`: have MLX compile the graph of a micro-batch.
    """

    split_head: bool = True
    share_prefixes: bool = True
    pack: bool = False
    recompute: bool = False
    cpu_kernels: bool = False
    compile: bool = False
    loss_chunk: int = 256

    @classmethod
    def plain(cls) -> Execution:
        """Return the reference: the model as mlx-lm runs it, with all logits."""
        return cls(split_head=False, share_prefixes=False)

    @classmethod
    def best(cls, parameters: int) -> Execution:
        """Return what measured best on the device in use, for a model with so many parameters."""
        if not on_cpu():
            return cls(compile=True)
        # The kernels need numba, a dependency on Linux, and arrays large enough for their calls.
        kernels = parameters >= _LARGE_MODEL and importlib.util.find_spec("numba") is not None
        return cls(cpu_kernels=kernels, pack=kernels)


def load_ahead(folder: Path) -> None:
    """Begin to load what computing with a model needs, beside what the caller does next.

    Guesses by the size of its files: what is not loaded then is loaded later.
    """
    size = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    if Execution.best(size).cpu_kernels:
        threading.Thread(target=_load_kernels, daemon=True).start()


def _load_kernels() -> None:
    # What fails here fails again where it is needed, and is said there.
    with suppress(Exception):
        from mlxtune.backend.cpu import kernels

        kernels.widen(0, 1, np.zeros((1, 1), np.uint16), np.zeros((1, 1), np.uint32))


class Forward:
    """Computes losses of one model, which has its LoRA already.

    Without `trains`, no gradient will be asked for, and the model may have no LoRA at all. Where an
    adapter is taken off and put back later, it has to be on the model here.

    Raises nothing of its own: what a model does not allow is not used, see `how`.
    """

    def __init__(
        self, model: nn.Module, dropout: DropoutKeys, how: Execution, *, trains: bool = True
    ) -> None:
        self.model = model
        self._dropout = dropout
        # Makes the model compute as it did before it was handed to this object.
        self.restore_model: Callable[[], None] = lambda: None
        if how.cpu_kernels:
            # Imported here: numba, which it needs, is a dependency on Linux alone.
            from mlxtune.backend.cpu import model as cpu_model
            from mlxtune.backend.cpu import products

            self.restore_model = cpu_model.make_fast(model)
            self._head_loss_sum, self._losses = products.head_loss_sum, products.losses
            self._head_losses = products.head_losses
        self._split = SplitModel(model)
        # The CPU's functions take float32 alone.
        eager = how.cpu_kernels and self._split.dtype is not None
        eager = eager and self._split.dtype == mx.float32
        self._layerwise: Layerwise | None = None
        if trains and (eager or how.recompute):
            layers, keeps = list(model.layers), eager and not how.recompute
            self._layerwise = Layerwise(layers, dropout, eager=eager, keep_products=keeps)
        splits = how.split_head and self._split.splits
        self.how = replace(
            how,
            cpu_kernels=eager,
            split_head=splits,
            share_prefixes=how.share_prefixes and splits,
            pack=how.pack and splits and eager,
        )
        self._shares: bool | None = None
        self._around_head: Callable[[Head, mx.array], mx.array] | None = None
        # The longest example that may stand in one line with others, 0 where none may.
        self.packs_up_to = self._split.packs() if self.how.pack else 0

    @property
    def shares_prefixes(self) -> bool:
        """Tell whether prefixes may be run apart, found out when first asked."""
        if self._shares is None:
            self._shares = self.how.share_prefixes and self._split.shares_prefixes()
        return self._shares

    @property
    def plain_head(self) -> bool:
        """Tell whether the head is one product and no more."""
        return self._split.weight is not None

    def arrays(self, batch: MicroBatch | Pack, keys: mx.array | None) -> dict[str, Any]:
        """Return a micro-batch as `loss_sum` takes it.

        `keys` are the dropout keys of its examples, uint32 (B,), or None for no dropout.
        """
        arrays: dict[str, Any] = {"inputs": mx.array(batch.inputs)}
        if isinstance(batch, Pack):
            arrays["layout"] = Layout(batch.segments)
            arrays["keys"] = None if keys is None else keys[mx.array(batch.owners)][None]
            return {
                **arrays,
                "positions": mx.array(batch.places),
                "targets": mx.array(batch.targets),
                "weights": mx.ones(len(batch.targets)),
            }
        if keys is not None:
            arrays["keys"] = keys
        if batch.prefix.size:
            arrays["prefix"] = mx.array(batch.prefix[None])
        if not self.how.split_head:
            return {**arrays, "targets": mx.array(batch.targets), "mask": mx.array(batch.mask)}
        positions = np.flatnonzero(batch.mask)
        targets = batch.targets.reshape(-1)[positions]
        weights = np.ones(len(positions), dtype=np.float32)
        if self.how.compile:
            # Few shapes: each is compiled anew.
            padding = (0, -len(positions) % _POSITIONS_MULTIPLE)
            positions, targets = np.pad(positions, padding), np.pad(targets, padding)
            weights = np.pad(weights, padding)
        return {
            **arrays,
            "positions": mx.array(positions.astype(np.int32)),
            "targets": mx.array(targets),
            "weights": mx.array(weights),
        }

    def loss_sum(self, arrays: Mapping[str, Any], *, backward: bool = True) -> mx.array:
        """Return the summed cross-entropy of a micro-batch, in nats, as a float32 scalar.

        `backward` tells whether a gradient will be asked for.
        """
        with self.running() if backward else nullcontext():
            return self._loss_sum(arrays)

    def running(self) -> AbstractContextManager[None]:
        """Have the layers that run in it prepare for their backward pass."""
        return nullcontext() if self._layerwise is None else self._layerwise.running()

    @contextmanager
    def watched(self, around: Callable[[Head, mx.array], mx.array]) -> Iterator[None]:
        """Have `around(head, rows)` run in the place of `head(rows)`, where the model is split."""
        self._around_head = around
        try:
            yield
        finally:
            self._around_head = None

    def losses(self, batch: MicroBatch | Pack) -> npt.NDArray[np.float64]:
        """Return the summed cross-entropy of each example, in nats, float64 (B,).

        Nothing is dropped, and no gradient is made.
        """
        arrays = self.arrays(batch, None)
        layout = arrays.get("layout")
        with laid_out(layout):
            found = self._losses_of(batch, arrays, self._caches(arrays, layout))
        each = np.array(found, dtype=np.float64)[: sum(batch.counts)]
        owners = np.repeat(np.arange(len(batch.counts)), batch.counts)
        sums = np.zeros(len(batch.counts))
        np.add.at(sums, owners, each)
        return sums

    def _losses_of(
        self, batch: MicroBatch | Pack, arrays: Mapping[str, Any], caches: list[Any] | None
    ) -> mx.array:
        """Return the cross-entropy of each supervised target, an example after the other."""
        inputs, targets = arrays["inputs"], arrays["targets"]
        if not self.how.split_head:
            assert isinstance(batch, MicroBatch)  # others are made where the head is split
            supervised = mx.array(np.flatnonzero(batch.mask))
            return cross_entropies(self.model, inputs, targets).reshape(-1)[supervised]
        hidden = self._split.hidden(inputs, caches)
        rows = hidden.reshape(-1, hidden.shape[-1])[arrays["positions"]]
        if self.how.cpu_kernels and self._split.weight is not None:
            return self._head_losses(self._split.weight, rows, targets)
        losses = self._losses if self.how.cpu_kernels else fused_losses
        return head_losses(self._split.logits, rows, targets, self.how.loss_chunk, losses)

    def _loss_sum(self, arrays: Mapping[str, Any]) -> mx.array:
        layout = arrays.get("layout")
        with laid_out(layout):
            caches = self._caches(arrays, layout)
            return self._loss_of(arrays, caches)

    def _caches(self, arrays: Mapping[str, Any], layout: Layout | None) -> list[Any] | None:
        """Return what each layer takes for its cache; set where dropout finds its keys."""
        keys, prefix = arrays.get("keys"), arrays.get("prefix")
        if layout is not None:
            self._dropout.set(keys, mx.array(layout.positions.astype(np.uint32)))
            return [PackedCache() for _ in self._split.layers]
        caches = None if prefix is None else self._run_prefix(prefix, keys)
        start, length = 0 if prefix is None else prefix.shape[1], arrays["inputs"].shape[1]
        self._dropout.set(keys, mx.arange(start, start + length, dtype=mx.uint32))
        return caches

    def _loss_of(self, arrays: Mapping[str, Any], caches: list[Any] | None) -> mx.array:
        inputs = arrays["inputs"]
        if not self.how.split_head:
            return cross_entropy_sum(self.model, inputs, arrays["targets"], arrays["mask"])
        hidden = self._split.hidden(inputs, caches)
        rows = hidden.reshape(-1, hidden.shape[-1])[arrays["positions"]]
        head = partial(self._head, arrays)
        return head(rows) if self._around_head is None else self._around_head(head, rows)

    def _head(self, arrays: Mapping[str, Any], rows: mx.array) -> mx.array:
        targets = arrays["targets"]
        if self.how.cpu_kernels and self._split.weight is not None:
            return self._head_loss_sum(self._split.weight, rows, targets)
        losses = self._losses if self.how.cpu_kernels else fused_losses
        chunk, weights = self.how.loss_chunk, arrays["weights"]
        return head_loss_sum(self._split.logits, rows, targets, weights, chunk, losses)

    def _run_prefix(self, prefix: mx.array, keys: mx.array | None) -> list[PrefixCache]:
        # Those who share a prefix under dropout are of one row, with one key.
        self._dropout.set(None if keys is None else keys[:1], None)
        recorders = [PrefixCache() for _ in self._split.layers]
        self._split.hidden(prefix, recorders)
        return [PrefixCache(recorder.recorded) for recorder in recorders]
