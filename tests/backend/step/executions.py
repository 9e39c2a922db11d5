"""Pipelines over one tiny model that compute steps in different ways, and steps to compare."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxtune.backend.forward import operations
from mlxtune.backend.forward.operations import CPU_OPERATIONS, MLX
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.workers.shards import shard_base
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.config import InstructConfig
from mlxtune.config.data_config import BaseOptions
from mlxtune.core.data.encode import Example
from mlxtune.core.objectives.objective import SFT, Objective
from mlxtune.core.steps.execution import Execution
from tests.backend.conftest import fill_lora_b
from tests.models import VOCAB_SIZE, write_model

# The reference: the model as mlx-lm runs it, with all logits.
PLAIN = Execution(operations.PLAIN, separate_head=False, packs=False)
SPLIT = Execution(MLX, packs=False)
PACKED = replace(SPLIT, packs=True)
# Without backend/cpu, MLX's operations stand in for the CPU's kernels.
_CPU = CPU_OPERATIONS or MLX
WAYS: dict[str, Execution] = {
    "split head": SPLIT,
    "split head in small chunks": replace(SPLIT, loss_chunk=3),
    "recompute": replace(PLAIN, operations=MLX, recompute=True),
    "packed": PACKED,
    "packed with recompute": replace(PACKED, recompute=True, loss_chunk=3),
    "cpu kernels": replace(PLAIN, operations=_CPU),
    "cpu kernels with recompute": replace(PLAIN, operations=_CPU, recompute=True),
    "cpu kernels with split head": replace(SPLIT, operations=_CPU, loss_chunk=3),
    "cpu kernels, packed": replace(PACKED, operations=_CPU, loss_chunk=3),
    "all": replace(PACKED, operations=_CPU, recompute=True, loss_chunk=3),
}

Gradients = dict[str, npt.NDArray[Any]]


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mlxtune-executions-")


@cache
def model_folder(
    model_type: str,
    quantize: int | None = None,
    dtype: str = "float32",
    overrides: tuple[tuple[str, Any], ...] = (),
) -> Path:
    """Return a cached folder of a tiny model with seeded weights."""
    count = len(list(Path(_root().name).iterdir()))
    folder = Path(_root().name) / f"{count}-{model_type}"
    return write_model(folder, model_type, quantize=quantize, dtype=dtype, **dict(overrides))


@cache
def pipeline(
    model_type: str,
    how: Execution = PLAIN,
    *,
    tokens: int = 1,
    fixed_cost: int = 0,
    quantize: int | None = None,
    overrides: tuple[tuple[str, Any], ...] = (),
    **config: Any,
) -> InstructPipeline:
    """Return a cached pipeline with random LoRA matrices; tests that change it must use `fresh`.

    By default it uses the plain path, with one example per micro-batch.
    """
    folder = model_folder(model_type, quantize, "float32", overrides)
    return fresh(folder, how, tokens, fixed_cost, **config)


def fresh(
    folder: Path,
    how: Execution = PLAIN,
    tokens: int = 1,
    fixed_cost: int = 0,
    workers: Workers = SINGLE_PROCESS,
    quantized_compute: str | None = None,
    objective: Objective = SFT,
    **config: Any,
) -> InstructPipeline:
    """Return a new pipeline with random LoRA matrices over a folder's model."""
    settings = InstructConfig(**{"lora_rank": 4, "lora_alpha": 8.0, "targets": ("all",), **config})
    options = {"quantized_compute": quantized_compute} if quantized_compute else {}
    base = load_base(folder, "float32", BaseOptions(**options))
    if workers.shards_model:
        base = shard_base(base, workers.group)
    made = InstructPipeline(
        base.model,
        settings,
        execution=replace(how, micro_batch_tokens=tokens, fixed_cost=fixed_cost),
        workers=workers,
        objective=objective,
    )
    fill_lora_b(made)
    return made


def gradients_of(found: Mapping[str, Any]) -> Gradients:
    """Return gradients as numpy arrays, by name."""
    return {name: np.array(value) for name, value in tree_flatten(found)}


@dataclass(frozen=True)
class Step:
    """A step's loss and gradients, with the numbers of real tokens and of forward tokens."""

    loss: float
    gradients: Gradients
    tokens: int
    forward_tokens: int


def computed(by: InstructPipeline, examples: list[Example]) -> Step:
    """Compute a step without an update, and return its results."""
    result = by.loss_and_gradients(examples, step=3)
    gradients = gradients_of(result.gradients)
    return Step(result.loss, gradients, result.tokens, result.counts.forward_tokens)


def assert_same(found: Step, expected: Step) -> None:
    """Compare losses to 1e-5, and gradients to 1e-4 of their largest entry."""
    assert found.tokens == expected.tokens
    assert abs(found.loss - expected.loss) <= 1e-5 * abs(expected.loss)
    assert_same_gradients(found.gradients, expected.gradients)


def assert_same_gradients(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    largest = max(np.abs(value).max() for value in expected.values())
    assert largest > 1e-4
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-4 * largest, name
    # Gradients of A and of B are not zero, so both are really compared.
    for half in ("lora_a", "lora_b"):
        assert max(np.abs(v).max() for k, v in expected.items() if k.endswith(half)) > 1e-6


def family(
    row: int, prefix: list[int], rests: list[int], rng: np.random.Generator, *, one_row: bool
) -> list[Example]:
    """Return examples with a common prefix; `rests` gives the numbers of random tokens after it."""
    examples = []
    for i, length in enumerate(rests):
        tokens = np.array([*prefix, *rng.integers(0, VOCAB_SIZE, length)], dtype=np.int32)
        mask = np.zeros(len(tokens), dtype=np.uint8)
        mask[len(prefix) :] = rng.integers(0, 2, length)
        mask[-1] = 1
        examples.append(Example(row if one_row else row + i, tokens, mask))
    return examples


@st.composite
def steps(draw: st.DrawFn, *, longest: int = 24) -> list[Example]:
    """Draw a step's examples: random families with a common prefix, masks, and duplicates."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    examples: list[Example] = []
    for number in range(draw(st.integers(1, 2))):
        prefix = rng.integers(0, VOCAB_SIZE, draw(st.integers(1, longest))).tolist()
        rests = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
        one_row = draw(st.booleans())
        members = family(10 * number + 1, prefix, rests, rng, one_row=one_row)
        if draw(st.booleans()):
            members.append(replace(members[0], row=members[0].row if one_row else 10 * number + 9))
        examples += members
    return examples


def fixed_step() -> list[Example]:
    """Return a step with rare cases: a long prefix, single tokens after it, and equal rows."""
    rng = np.random.default_rng(5)
    system = rng.integers(0, VOCAB_SIZE, 21).tolist()
    other = rng.integers(0, VOCAB_SIZE, 6).tolist()
    long = family(1, system, [1, 9], rng, one_row=False)
    turns = family(7, [*system, *other], [2, 11], rng, one_row=True)
    return [*long, *turns, *family(11, other, [1, 4], rng, one_row=True), long[1]]


def first_supervised(example: Example) -> Example:
    """Return the example with its first token supervised, as in `text` rows without BOS."""
    mask = example.assistant_mask.copy()
    mask[0] = 1
    return replace(example, assistant_mask=mask)


@cache
def plain_step(model_type: str, quantize: int | None = None, **config: Any) -> Step:
    """Return the plain path's results for `fixed_step`."""
    return computed(pipeline(model_type, quantize=quantize, **config), fixed_step())
