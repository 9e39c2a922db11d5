"""AdamW over the LoRA matrices, with a separate learning rate for B under LoRA+."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxtune.backend.model.compiling import compiled, compiles
from mlxtune.config import InstructConfig

# Keeps the scale of a clipped gradient finite, as in mlx.optimizers.clip_grad_norm.
_SMALLEST_NORM = 1e-6
# Squares are summed in rows of this many entries, and then by row, which rounds less.
_ROW = 1024


class Update(NamedTuple):
    """The result of an update, not yet computed.

    `norm` is that of the gradient before clipping. Unless `finite`, `parameters`, the `vectors`
    that they are parts of, and `state`, the optimizer's, are those before.
    """

    parameters: dict[str, Any]
    vectors: list[mx.array]
    state: dict[str, Any]
    norm: mx.array
    finite: mx.array


class LoRAOptimizer:
    """Clipping and AdamW over all LoRA matrices, and a check that all numbers are finite.

    AdamW has decoupled weight decay and bias correction, arXiv:1711.05101, algorithm 2. The
    matrices are joined into one vector, so that an update is a few operations however many there
    are. With an `lr_ratio`, there are two, all A and the rest (B and DoRA's `m`), which learns at
    that multiple of A's rate (LoRA+, arXiv:2402.12354, section 4; `m` as in PEFT); weight decay is
    scaled by each one's rate, as in PEFT's create_loraplus_optimizer with `loraplus_weight_decay`.
    """

    def __init__(self, parameters: Any, config: InstructConfig) -> None:
        named = tree_flatten(parameters)
        a, rest = ([n for n, _ in named if n.endswith("lora_a") == is_a] for is_a in (True, False))
        self._names = [a + rest] if config.lr_ratio == 1 else [a, rest]
        self._shapes = {name: value.shape for name, value in named}
        self._ratios = 1.0, config.lr_ratio
        self._max_norm = config.gradient_clip_norm or math.inf
        self._adamw = optim.AdamW(
            config.learning_rate,
            betas=[0.9, 0.999],
            eps=1e-8,
            weight_decay=config.weight_decay,
            bias_correction=True,
        )
        # Of the last update: the parameters by name, and the vectors that they are parts of.
        self._parts: dict[str, mx.array] = {}
        self._vectors = vectors = self._join(parameters)
        self.state: dict[str, Any] = {
            "step": mx.array(0, mx.uint64),
            "m": [mx.zeros_like(vector) for vector in vectors],
            "v": [mx.zeros_like(vector) for vector in vectors],
        }
        # It has the same shapes in each step.
        self._compiled = compiled(self._take)

    def update(
        self,
        parameters: Any,
        gradients: Any,
        loss: mx.array,
        rate: float,
        after: Update | None = None,
    ) -> Update:
        """Return the update at a rate, after one that is not committed; `loss` is checked, too."""
        state, vectors = (after.state, after.vectors) if after else (self.state, self._vectors)
        if after is None and not self._are_parts(parameters):
            vectors = self._join(parameters)
        step = self._compiled if compiles() else self._take
        vectors, state, norm, finite = step(
            vectors, self._join(gradients), loss, state, mx.array(rate)
        )
        return Update(self._split(vectors), vectors, state, norm, finite)

    def commit(self, update: Update) -> None:
        """Make an update the state that the next one starts from."""
        self.state, self._vectors = update.state, update.vectors
        self._parts = dict(tree_flatten(update.parameters))

    def _are_parts(self, parameters: Any) -> bool:
        """Return whether these are the parameters of the last update, as they were."""
        return all(self._parts.get(name) is value for name, value in tree_flatten(parameters))

    def _take(
        self,
        parameters: list[mx.array],
        gradients: list[mx.array],
        loss: mx.array,
        state: dict[str, Any],
        rate: mx.array,
    ) -> tuple[list[mx.array], dict[str, Any], mx.array, mx.array]:
        squares = [mx.square(vector).reshape(-1, _ROW).sum(axis=1).sum() for vector in gradients]
        norm = mx.sqrt(sum(squares[1:], squares[0]))
        scale = mx.minimum(self._max_norm / (norm + _SMALLEST_NORM), 1.0)
        step = state["step"] + 1
        updated, moments = [], []
        for i, ratio in zip(range(len(parameters)), self._ratios, strict=False):
            moment = {"m": state["m"][i], "v": state["v"][i]}
            self._adamw.state = {"step": step, "learning_rate": rate * ratio}
            updated.append(self._adamw.apply_single(gradients[i] * scale, parameters[i], moment))
            moments.append(moment)
        new = {
            "step": step,
            "m": [each["m"] for each in moments],
            "v": [each["v"] for each in moments],
        }
        every = [norm, loss, *(vector.sum() for vector in updated)]
        finite = mx.isfinite(mx.stack(every)).all()
        kept = tree_map(
            lambda new, old: mx.where(finite, new, old), [updated, new], [parameters, state]
        )
        return *kept, norm, finite

    def _join(self, tree: Any) -> list[mx.array]:
        """Return the vectors of a tree of matrices, padded with zeros to whole rows."""
        arrays, vectors = dict(tree_flatten(tree)), []
        for names in self._names:
            flat = [arrays[name].reshape(-1) for name in names]
            padding = -sum(part.size for part in flat) % _ROW
            vectors.append(mx.concatenate([*flat, mx.zeros(padding)]))
        return vectors

    def _split(self, vectors: Sequence[mx.array]) -> dict[str, Any]:
        arrays: list[tuple[str, mx.array]] = []
        for names, vector in zip(self._names, vectors, strict=True):
            start = 0
            for name in names:
                shape = self._shapes[name]
                end = start + math.prod(shape)
                arrays.append((name, vector[start:end].reshape(shape)))
                start = end
        return dict(tree_unflatten(arrays))
