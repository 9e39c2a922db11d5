"""A step that takes more memory than there is: halved, with the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.model import memory
from mlxtune.backend.step.head import SplitModel
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.errors import MemoryLimitError
from tests.backend.conftest import MakePipeline, random_examples

EXAMPLES = random_examples(6)
LARGE = 10**6


@pytest.fixture(autouse=True)
def restore_limit() -> Iterator[None]:
    limit = mx.get_memory_limit()
    yield
    mx.set_memory_limit(limit)


@pytest.fixture
def make(make_pipeline: MakePipeline) -> Callable[..., tuple[InstructPipeline, list[str]]]:
    """Return a function that builds a pipeline, and the list of what it warns of."""

    def make(tokens: int) -> tuple[InstructPipeline, list[str]]:
        pipeline, warnings = make_pipeline("qwen3", micro_batch_tokens=tokens), []
        pipeline._micro_batches._warn = warnings.append
        return pipeline, warnings

    return make


def adapters(pipeline: InstructPipeline) -> dict[str, Any]:
    return {
        name: np.array(value) for name, value in tree_flatten(pipeline.model.trainable_parameters())
    }


def fail(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have the second micro-batch run out of memory, and those after it, so many times."""
    whole, calls = SplitModel.hidden, iter(range(10**9))

    def failing(self: SplitModel, *args: Any, **options: Any) -> mx.array:
        if 1 <= next(calls) <= times:
            raise RuntimeError("[malloc] Unable to allocate 78643200 bytes.")
        return whole(self, *args, **options)

    monkeypatch.setattr(SplitModel, "hidden", failing)


def test_failed_allocation_halves_and_the_step_is_that_of_half(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    halved, warnings = make(80)
    with monkeypatch.context() as patch:
        fail(patch, 1)
        results = [halved.train_batch(EXAMPLES) for _ in range(2)]

    assert halved.micro_batch_tokens <= 40
    assert len(warnings) == 1
    assert f"memory ran out: micro-batches of up to {halved.micro_batch_tokens} " in warnings[0]
    small, _ = make(halved.micro_batch_tokens)
    assert [small.train_batch(EXAMPLES) for _ in range(2)] == results
    expected = adapters(small)
    for name, value in adapters(halved).items():
        assert value.tobytes() == expected[name].tobytes()


def test_allocation_that_fails_for_single_examples_is_an_error_that_changes_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, _ = make(80)
    before = adapters(pipeline)
    fail(monkeypatch, 10**6)
    with pytest.raises(MemoryLimitError, match="lower --max-seq-len"):
        pipeline.train_batch(EXAMPLES)
    for name, value in adapters(pipeline).items():
        assert np.array_equal(value, before[name])


def test_other_errors_pass_through(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> mx.array:
        raise RuntimeError("[matmul] shapes")

    pipeline, warnings = make(80)
    monkeypatch.setattr(SplitModel, "hidden", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        pipeline.train_batch(EXAMPLES)
    assert warnings == []


def test_use_over_the_limit_halves_what_follows_and_teaches_the_same(make: Any) -> None:
    (large, warnings), (small, _) = make(LARGE), make(50)
    mx.set_memory_limit(mx.get_active_memory() + 1000)
    for _ in range(8):
        large.train_batch(EXAMPLES)
        small.train_batch(EXAMPLES)

    sizes = [int(text.split("up to ")[1].split()[0]) for text in warnings[:-1]]
    assert len(sizes) >= 2
    assert all(after <= before / 2 for before, after in pairwise(sizes))
    # In the end each example runs by itself, which is said once.
    assert "one example at a time" in warnings[-1]
    assert sum("one example" in text for text in warnings) == 1
    expected = adapters(small)
    for name, value in adapters(large).items():
        assert np.allclose(value, expected[name], rtol=1e-5, atol=1e-5), name


def test_use_within_the_limit_changes_nothing(make: Any) -> None:
    pipeline, warnings = make(LARGE)
    pipeline.train_batch(EXAMPLES)
    pipeline.evaluate(EXAMPLES)
    assert (pipeline.micro_batch_tokens, warnings) == (LARGE, [])


def test_validation_halves_too(make: Any) -> None:
    pipeline, warnings = make(LARGE)
    expected = pipeline.evaluate(EXAMPLES)
    mx.set_memory_limit(1)
    pipeline.evaluate(EXAMPLES)
    assert pipeline.micro_batch_tokens < LARGE
    assert len(warnings) == 1
    assert pipeline.evaluate(EXAMPLES).avg_loss == pytest.approx(expected.avg_loss, rel=1e-5)


# What a step says of how it was run


def test_step_counts_its_micro_batches_and_their_padding(
    make: Callable[..., tuple[InstructPipeline, list[str]]],
) -> None:
    pipeline, _ = make(LARGE)
    for tokens in (LARGE, 40):
        pipeline.micro_batch_tokens = tokens
        batches = [batch for _, batch in pipeline.micro_batches(EXAMPLES)]
        groups = [group for group, _ in pipeline.micro_batches(EXAMPLES)]
        found = pipeline.train_batch(EXAMPLES)
        assert found.micro_batches == len(batches)
        assert found.run_tokens == sum(group.tokens for group in groups)
        # What runs of an example is all but its last token, which nothing follows.
        assert found.run_tokens - found.padding == sum(len(each) - 1 for each in EXAMPLES)


def test_step_says_its_own_peak_and_not_that_of_one_before(
    make: Callable[..., tuple[InstructPipeline, list[str]]],
) -> None:
    pipeline, _ = make(LARGE)
    # What other tests left in memory is in every peak.
    before = mx.get_active_memory()
    wide = pipeline.train_batch(EXAMPLES).memory - before
    large = mx.zeros((100_000_000,), mx.uint8)
    mx.eval(large)
    del large
    pipeline.micro_batch_tokens = 1
    alone = pipeline.train_batch(EXAMPLES).memory - before
    assert 0 < alone < wide < 50_000_000
    assert memory.peak_bytes() - before >= 50_000_000, "that of the run is kept"


def test_step_that_was_over_the_limit_says_its_peak_all_the_same(
    make: Callable[..., tuple[InstructPipeline, list[str]]],
) -> None:
    pipeline, warnings = make(LARGE)
    wide = pipeline.train_batch(EXAMPLES).memory
    pipeline, warnings = make(LARGE)
    mx.set_memory_limit(1)
    found = pipeline.train_batch(EXAMPLES).memory
    assert len(warnings) == 1
    assert found > wide / 2
