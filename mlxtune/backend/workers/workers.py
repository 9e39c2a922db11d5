"""The processes that mlx.launch starts to train together, and their communication."""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from mlxtune.backend.workers.environment import is_one_of_several
from mlxtune.core.steps.scaling import balance
from mlxtune.core.training.requests import Requests
from mlxtune.errors import WorkerError

# The size in bytes of the call number in front of gathered data, and of a text's length.
_NUMBER_SIZE = 8


class StepCounts(NamedTuple):
    """What a step counts besides its loss, on one worker or on all.

    `stop` and `save` are the numbers of workers that request to stop and to save.
    """

    micro_batches: int = 0
    forward_tokens: int = 0
    padding: int = 0
    stop: int = 0
    save: int = 0

    @property
    def requests(self) -> Requests:
        return Requests(self.stop > 0, self.save > 0)

    def requesting(self, requests: Requests) -> "StepCounts":
        """Return these counts with the requests of this worker."""
        return self._replace(stop=int(requests.stop), save=int(requests.save))

    def to_array(self, fraction: float) -> mx.array:
        """Return the counts as float32 (5,); a `fraction` of those that all workers share."""
        shared = (self.micro_batches, self.forward_tokens, self.padding)
        return mx.array([*(fraction * count for count in shared), self.stop, self.save])

    @classmethod
    def from_array(cls, counts: Any) -> "StepCounts":
        """Return computed counts, float32 (5,)."""
        return cls(*map(round, counts.tolist()))


class Workers:
    """A group of workers, or this process alone if `group` is None.

    Workers share the examples of a step or, with `tensor`, the model: each then computes its part
    of the model for all examples. All workers must call communicating methods in the same order.
    """

    def __init__(self, group: Any = None, *, tensor: bool = False) -> None:
        self.group = group
        self.shards_model = tensor and group is not None
        self.rank = 0 if group is None else int(group.rank())
        self.world_size = 1 if group is None else int(group.size())
        self._gathered = 0

    @classmethod
    def launched(cls, *, tensor: bool = False) -> "Workers":
        """Return the workers of this launch; without a launch, this process alone."""
        if not is_one_of_several():
            return cls()
        group = mx.distributed.init()
        return cls(group if group.size() > 1 else None, tensor=tensor)

    def describe(self) -> int | str:
        """Return the number of workers and whether they share the model: results depend on both."""
        return (
            f"{self.world_size} workers that share the model"
            if self.shards_model
            else self.world_size
        )

    def own_items(self, costs: Sequence[float]) -> list[int]:
        """Return the indices of this worker's items, ascending; see `balance`."""
        if self.shards_model:
            return list(range(len(costs)))
        return balance(costs, self.world_size)[self.rank]

    def sum(self, tree: Any) -> Any:
        """All-reduce a tree of float32 arrays; return the unevaluated sums."""
        if self.world_size == 1:
            return tree
        named = tree_flatten(tree)
        flat = mx.concatenate([value.astype(mx.float32).reshape(-1) for _, value in named])
        flat = mx.distributed.all_sum(flat, group=self.group)
        ends = np.cumsum([value.size for _, value in named]).tolist()
        parts = mx.split(flat, ends[:-1])
        return tree_unflatten(
            [
                (name, part.reshape(value.shape))
                for (name, value), part in zip(named, parts, strict=True)
            ]
        )

    def sum_step(
        self,
        loss: mx.array,
        gradients: Any,
        counts: StepCounts,
        replicated: Collection[str] = (),
    ) -> list[Any]:
        """Return the loss, the gradients and the counts, summed over all workers.

        Each worker passes the sums over its examples. Workers that share the model have the same
        loss and counts, and the same gradients of the modules `replicated`: these all count once.
        """
        fraction = 1 / self.world_size if self.shards_model else 1.0

        def weigh(name: str, gradient: mx.array) -> mx.array:
            return gradient * fraction if name.rpartition(".")[0] in replicated else gradient

        if self.shards_model:
            gradients = tree_map_with_path(weigh, gradients)
        return self.sum([loss * fraction, gradients, counts.to_array(fraction)])

    def sum_own(self, values: mx.array) -> mx.array:
        """Merge float32 values; each worker passes zeros in place of the other workers' values."""
        return values if self.shards_model else mx.distributed.all_sum(values, group=self.group)

    def merge(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Merge values (n,) exactly; each worker passes zeros for the values of other workers."""
        if self.world_size == 1 or self.shards_model or not len(values):
            return values
        bits = mx.array(np.ascontiguousarray(values).view(np.uint32))
        summed = mx.distributed.all_sum(bits, group=self.group)
        return np.array(summed).view(np.float64)

    def all_gather_text(self, own: str) -> list[str]:
        """Return every worker's text, by rank. Raises WorkerError if a worker is gone."""
        if self.world_size == 1:
            return [own]
        data = own.encode()
        sizes = self._gather(len(data).to_bytes(_NUMBER_SIZE, "big"))
        lengths = [int.from_bytes(size, "big") for size in sizes]
        rows = self._gather(data.ljust(max(lengths), b"\0"))
        return [row[:length].decode() for row, length in zip(rows, lengths, strict=True)]

    def check_same(self, tree: Any, step: int) -> None:
        """Raise WorkerError unless `tree`, the adapter after a step, is equal on all workers."""
        if self.world_size == 1:
            return
        digest = hashlib.sha256()
        for _, value in tree_flatten(tree):
            digest.update(np.array(value).tobytes())
        first, *others = self.all_gather_text(digest.hexdigest())
        if differ := [str(worker) for worker, other in enumerate(others, 1) if other != first]:
            raise WorkerError(
                f"after step {step}, the adapter of worker {' and '.join(differ)} differs from "
                "that of worker 0: check that all machines run the same versions"
            )

    def add_zeros(self, count: int) -> None:
        """All-reduce `count` float32 zeros, to measure the time."""
        mx.eval(mx.distributed.all_sum(mx.zeros(count), group=self.group))

    def barrier(self) -> None:
        """Wait until all workers have called this method."""
        self.all_gather_text("")

    def broadcast(self, tree: Any) -> Any:
        """Return worker 0's arrays, evaluated; each worker passes a tree of the same shapes."""
        if self.world_size == 1:
            return tree
        named = tree_flatten(tree)
        received = []
        for name, value in named:
            raw = value.reshape(-1).view(mx.uint8) if value.size else value
            mine = raw if self.rank == 0 else mx.zeros_like(raw)
            same = mx.distributed.all_sum(mine, group=self.group)
            received.append((name, same.view(value.dtype).reshape(value.shape)))
        mx.eval([value for _, value in received])
        return tree_unflatten(received)

    def broadcast_bytes(self, own: bytes) -> bytes:
        """Return worker 0's bytes; the other workers' bytes are ignored."""
        (size,) = np.array(self.broadcast(mx.array([len(own)], dtype=mx.uint64))).tolist()
        mine = np.frombuffer(own, np.uint8) if self.rank == 0 else np.zeros(size, np.uint8)
        return np.array(self.broadcast(mx.array(mine))).tobytes() if size else b""

    def _gather(self, own: bytes) -> list[bytes]:
        """Return the bytes of all workers, which must have equal length.

        Raises WorkerError if a worker is gone. MLX's ring then returns arbitrary memory, so each
        worker's bytes begin with the number of the call, which is checked.
        """
        self._gathered += 1
        number = self._gathered.to_bytes(_NUMBER_SIZE, "big")
        mine = mx.array(np.frombuffer(number + own, np.uint8))[None]
        gathered = np.array(mx.distributed.all_gather(mine, group=self.group))
        rows = [row.tobytes() for row in gathered]
        if not all(row.startswith(number) for row in rows):
            raise WorkerError("another worker is gone, or is at a different point in the run")
        return [row[_NUMBER_SIZE:] for row in rows]


SINGLE_PROCESS = Workers()
