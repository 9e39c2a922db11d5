"""AdamW over the LoRA matrices, with a separate learning rate for B under LoRA+."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxtune.backend.model.compiling import compiled as compiled_function
from mlxtune.config import InstructConfig

# Keeps the scale of a clipped gradient finite, as in mlx.optimizers.clip_grad_norm.
_SMALLEST_NORM = 1e-6
# Squares are summed in rows of this many entries, and then by row, which rounds less.
_ROW = 1024


class Update(NamedTuple):
    """The result of an update, not yet computed.

    `norm` is that of the gradient before clipping. Unless `finite`, `parameters` and `state`, the
    optimizer's, are those before.
    """

    parameters: dict[str, Any]
    state: dict[str, Any]
    norm: mx.array
    finite: mx.array


class LoRAOptimizer:
    """Clipping and AdamW over all LoRA matrices, and a check that all numbers are finite.

    AdamW has decoupled weight decay and bias correction, arXiv:1711.05101, algorithm 2. The
    matrices are joined into two vectors, all A and the rest (B and DoRA's `m`), so that an update
    is a few operations however many there are. With an `lr_ratio`, the rest learns at that
    multiple of A's rate (LoRA+, arXiv:2402.12354, section 4; `m` as in PEFT); weight decay is
    scaled by each one's rate, as in PEFT's create_loraplus_optimizer with `loraplus_weight_decay`.

    `compiled`: have MLX compile the update.
    """

    def __init__(self, parameters: Any, config: InstructConfig, *, compiled: bool) -> None:
        named = tree_flatten(parameters)
        self._names = [
            [name for name, _ in named if name.endswith("lora_a")],
            [name for name, _ in named if not name.endswith("lora_a")],
        ]
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
        vectors = self._join(parameters)
        self.state: dict[str, Any] = {
            "step": mx.array(0, mx.uint64),
            "m": [mx.zeros_like(vector) for vector in vectors],
            "v": [mx.zeros_like(vector) for vector in vectors],
        }
        self._step = self._take
        if compiled:
            self.compile()

    def compile(self) -> None:
        """Have MLX compile the update, which has the same shapes in each step."""
        if self._step == self._take:
            self._step = compiled_function(self._take)

    def update(self, parameters: Any, gradients: Any, loss: mx.array, rate: float) -> Update:
        """Return the update at a rate, for `state` to be set; `loss` has to be finite, too."""
        vectors, state, norm, finite = self._step(
            self._join(parameters), self._join(gradients), loss, self.state, mx.array(rate)
        )
        return Update(self._split(vectors), state, norm, finite)

    def _take(
        self,
        parameters: list[mx.array],
        gradients: list[mx.array],
        loss: mx.array,
        state: dict[str, Any],
        rate: mx.array,
    ) -> tuple[list[mx.array], dict[str, Any], mx.array, mx.array]:
        squares = [mx.square(vector).reshape(-1, _ROW).sum(axis=1).sum() for vector in gradients]
        norm = mx.sqrt(squares[0] + squares[1])
        scale = mx.minimum(self._max_norm / (norm + _SMALLEST_NORM), 1.0)
        step = state["step"] + 1
        updated, moments = [], []
        for i, ratio in enumerate(self._ratios):
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
