"""How a step is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import run_length
from mlxtune.core.steps.groups import Group, StepCost, plan_step
from mlxtune.core.steps.pack import plan_packs
from mlxtune.core.steps.shapes import Load, ModelShapes

_DEFAULT_COST = StepCost()


class MemoryUse(Protocol):
    """The memory that operations take, in entries of arrays of the compute dtype.

    `casts_quantized`: one quantised matrix at a time is cast; else each is unpacked for its
    product, the head in `head_copies` copies.
    """

    casts_quantized: bool
    head_copies: int

    def kept(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return the entries that all layers keep from their forward to their backward passes."""

    def in_layer(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return the working entries of one layer's backward pass, in addition to those kept."""

    def in_head(self, shapes: ModelShapes, execution: Execution, load: Load) -> int:
        """Return the working entries of the head, in addition to those kept."""

    def holds_logits(self, shapes: ModelShapes) -> bool:
        """Return whether the head holds logits, fewer in smaller chunks."""


class LinearHead(Protocol):
    """Cross-entropy of a head that is one product with `weight` (V, H), without its logits."""

    def head_loss_sum(self, weight: Any, hidden: Any, targets: Any) -> Any:
        """Return the sum over hidden states (P, H), in nats, with its gradient."""

    def head_losses(self, weight: Any, hidden: Any, targets: Any) -> Any:
        """Return the loss of each hidden state, float32 (P,), without a gradient."""


class LayerPasses(Protocol):
    """Runs the layers of a model so that what their backward passes need takes less memory."""

    def run(self, layer: Any, names: Sequence[str], function: Any, inputs: Sequence[Any]) -> Any:
        """Return a layer's output; it is a function of arrays, `names` its trained parameters."""

    def run_frozen(self, output: Any) -> Any:
        """Return the output of a layer below the first that is trained."""


class Operations(Protocol):
    """The operations that compute a step on a device; arrays and modules are the backend's.

    `packs`: attention can keep apart examples that stand end to end. `linear_head` is None if a
    linear head is computed like any other.
    """

    packs: bool
    memory: MemoryUse

    @property
    def linear_head(self) -> LinearHead | None: ...

    def load(self) -> None:
        """Load libraries and kernels ahead of their first use."""

    def serves(self, dtype: Any) -> bool:
        """Return whether models whose hidden states have this dtype (None: unknown) can be run."""

    def prepare(self, model: Any) -> Callable[[], None]:
        """Make a model compute with these operations; return a function that undoes it."""

    def cross_entropies(self, logits: Any, targets: Any) -> Any:
        """Return float32 (P,), in nats, for logits (P, V) and targets int32 (P,)."""

    def layer_passes(self, recompute: bool) -> LayerPasses | None:
        """Return how layers prepare for their backward passes; None leaves it to MLX."""


@dataclass(frozen=True)
class Execution:
    """How a step is computed. Nothing here changes its loss or gradient beyond float rounding.

    `operations` compute it. `micro_batch_tokens` bounds the padded tokens that run through the
    model at once. `split_head`: run the head on supervised positions only, `loss_chunk` at a time.
    `share_prefixes`: run prefixes that examples share once. `packs_up_to`: lay examples of up to
    this many tokens end to end instead of padding them. `recompute`: keep only the input of each
    layer, and run the layer again in the backward pass. `compile`: have MLX compile the graph of a
    micro-batch. `holds_scores`: attention holds the scores of a layer, which memory depends on.
    `cost` is what a micro-batch costs beyond its tokens.
    """

    operations: Operations
    micro_batch_tokens: int = 2048
    split_head: bool = True
    share_prefixes: bool = True
    packs_up_to: int = 0
    recompute: bool = False
    compile: bool = False
    loss_chunk: int = 256
    holds_scores: bool = False
    cost: StepCost = _DEFAULT_COST

    def plan(self, examples: Sequence[Example], *, keyed: bool = False) -> list[Group]:
        """Return the micro-batches of a step; with `keyed`, only equal keys share a prefix."""
        tokens, share = self.micro_batch_tokens, self.share_prefixes
        if max(map(run_length, examples)) <= self.packs_up_to:
            return plan_packs(examples, tokens, self.cost.fixed, share=share, keyed=keyed)
        return plan_step(examples, tokens, self.cost, share_prefixes=share, keyed=keyed)
