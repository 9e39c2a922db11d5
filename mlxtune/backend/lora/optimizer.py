"""AdamW over the LoRA matrices: clipping, LoRA+'s rate for B, and the check for finite numbers."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map, tree_unflatten

from mlxtune.backend.device.default_device import compiles
from mlxtune.backend.lora.vectors import MULTIPLE, LoRAVectorLayout
from mlxtune.config import InstructConfig

# Added to the norm before dividing by it, as in mlx.optimizers.clip_grad_norm.
_MIN_NORM = 1e-6


class OptimizerUpdate(NamedTuple):
    """The result of an update, not yet computed: the `parameters` by name, and the rest.

    `norm` is the gradient's norm before clipping. If `finite` is false, the `parameters`, the
    `vectors` that hold them and the optimizer's `state` are those before the update.
    """

    parameters: dict[str, mx.array]
    vectors: list[mx.array]
    state: dict[str, Any]
    norm: mx.array
    finite: mx.array


class LoRAOptimizer:
    """Clipping and AdamW over all LoRA matrices, and a check that all numbers are finite.

    AdamW has decoupled weight decay and bias correction, arXiv:1711.05101, algorithm 2. The
    matrices are joined into one vector, so an update takes only a few operations, however many
    matrices there are. With an `lr_ratio`, there are two vectors: all A, and the rest (B and DoRA's
    `m`), whose learning rate is `lr_ratio` times that of A (LoRA+, arXiv:2402.12354, section 4; `m`
    as in PEFT). Weight decay is scaled by each vector's rate, as in PEFT's
    create_loraplus_optimizer with `loraplus_weight_decay`.
    """

    def __init__(self, vectors: LoRAVectorLayout, parameters: Any, config: InstructConfig) -> None:
        self._layout = vectors
        self._ratios = 1.0, config.lr_ratio
        self._max_norm = config.max_grad_norm or math.inf
        self._adamw = optim.AdamW(
            0.0,  # `_adamw_step` sets the rate of each step.
            betas=[0.9, 0.999],
            eps=1e-8,
            weight_decay=config.weight_decay,
            bias_correction=True,
        )
        # The last update's parameters by name, and the vectors that hold them.
        self._parts: dict[str, mx.array] = {}
        self._vectors = joined = vectors.join(parameters)
        self.state: dict[str, Any] = {
            "step": mx.array(0, mx.uint64),
            "m": [mx.zeros_like(vector) for vector in joined],
            "v": [mx.zeros_like(vector) for vector in joined],
        }
        # Compiled once, because all steps have the same shapes.
        self._compiled = mx.compile(self._adamw_step)

    def adopt(self, model: nn.Module) -> None:
        """Replace a model's parameters with slices of the vectors of the next update."""
        self._vectors = self._layout.join(model.trainable_parameters())
        mx.eval(self._vectors)
        adopted = self._layout.matrices(self._vectors)
        self._parts = adopted
        model.update(tree_unflatten(list(adopted.items())))

    def vectors(
        self, parameters: Mapping[str, mx.array], after: OptimizerUpdate | None = None
    ) -> list[mx.array]:
        """Return the vectors of an uncommitted update, if given, or else of the parameters."""
        if after is not None:
            return after.vectors
        return self._vectors if self._are_parts(parameters) else self._layout.join(parameters)

    def update(
        self,
        vectors: list[mx.array],
        gradients: list[mx.array],
        loss: mx.array,
        learning_rate: float,
        after: OptimizerUpdate | None = None,
    ) -> OptimizerUpdate:
        """Return the update of vectors by their gradients, at learning rate `learning_rate`.

        The update is `finite` only if `loss` is too. It continues from the uncommitted `after`, if
        given.
        """
        state = after.state if after else self.state
        step = self._compiled if compiles() else self._adamw_step
        vectors, state, norm, finite = step(
            vectors, gradients, loss, state, mx.array(learning_rate)
        )
        return OptimizerUpdate(self._layout.matrices(vectors), vectors, state, norm, finite)

    def commit(self, update: OptimizerUpdate) -> None:
        """Make the next update start from the result of this update."""
        self.state, self._vectors = update.state, update.vectors
        self._parts = update.parameters

    def state_for_file(self) -> dict[str, Any]:
        """Return the evaluated state in a file's layout."""
        state = self._with_moments(self._layout.for_file)
        mx.eval(state)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace the state with one in a file's layout."""
        self.state = state
        self.state = self._with_moments(self._layout.from_file)

    def _with_moments(self, change: Callable[[list[mx.array]], list[mx.array]]) -> dict[str, Any]:
        return {
            "step": self.state["step"],
            "m": change(self.state["m"]),
            "v": change(self.state["v"]),
        }

    def _are_parts(self, parameters: Mapping[str, mx.array]) -> bool:
        """Return whether the parameters are still the result of the last update."""
        return all(self._parts.get(name) is value for name, value in parameters.items())

    def _adamw_step(
        self,
        parameters: list[mx.array],
        gradients: list[mx.array],
        loss: mx.array,
        state: dict[str, Any],
        learning_rate: mx.array,
    ) -> tuple[list[mx.array], dict[str, Any], mx.array, mx.array]:
        # Summing each row first reduces rounding errors.
        squares = [
            mx.square(vector).reshape(-1, MULTIPLE).sum(axis=1).sum() for vector in gradients
        ]
        norm = mx.sqrt(sum(squares[1:], squares[0]))
        scale = mx.minimum(self._max_norm / (norm + _MIN_NORM), 1.0)
        step = state["step"] + 1
        updated, moments = [], []
        for i, ratio in zip(range(len(parameters)), self._ratios, strict=False):
            moment = {"m": state["m"][i], "v": state["v"][i]}
            self._adamw.state = {"step": step, "learning_rate": learning_rate * ratio}
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
