"""The choice of an execution: whether it fits, its speed, and the advice if none fits."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_plan import (
    MARGIN,
    MemoryPlan,
    Workload,
    choose_memory_plan,
    max_example_length,
    sample_steps,
    why_not,
)
from mlxtune.core.steps.memory_terms import BatchLoad, Factors, MemoryCorrection, ModelShapes
from mlxtune.core.steps.pack import StepLengths
from tests.core.steps.shapes import GRAPH_OPERATIONS, LEAN_OPERATIONS, shapes

AMPLE = 10**12
LEAN, GRAPH = Execution(LEAN_OPERATIONS), Execution(GRAPH_OPERATIONS)


def example(length: int, row: int = 1) -> Example:
    mask = np.zeros(length, dtype=np.uint8)
    mask[-2:] = 1
    return Example(row, (np.arange(length) + row).astype(np.int32), mask)


def work(*lengths: int, steps: int = 2) -> Workload:
    """Return steps of examples of these lengths, without shared prefixes."""
    every = [[example(n, 1000 * i) for i, n in enumerate(lengths)] for _ in range(steps)]
    longest = max(lengths)
    return Workload(list(map(StepLengths.of, every)), (BatchLoad.single(longest, 2),))


def chosen(
    given: Workload,
    limit: int = AMPLE,
    *,
    execution: Execution | None = None,
    recompute_choices: tuple[bool, ...] = (False, True),
    tolerance: float = 0.1,
    of: ModelShapes | None = None,
) -> MemoryPlan | None:
    return choose_memory_plan(
        of or shapes(),
        given,
        execution or LEAN,
        limit=limit,
        recompute_choices=recompute_choices,
        tolerance=tolerance,
    )


def test_narrow_micro_batch_wins_if_a_wider_one_is_hardly_faster() -> None:
    given, cheap = work(*[64] * 8), replace(LEAN, fixed_cost=1)
    narrow, wide = (chosen(given, execution=cheap, tolerance=fraction) for fraction in (0.1, 0.0))
    assert narrow
    assert wide
    assert narrow.execution.micro_batch_tokens < wide.execution.micro_batch_tokens
    assert narrow.peak.total < wide.peak.total
    assert narrow.time <= 1.1 * wide.time


def test_recomputation_is_chosen_only_if_needed_to_fit() -> None:
    given = work(400, 400)
    free = chosen(given)
    assert free
    assert not free.execution.recompute
    tight = chosen(given, int(chosen_least(given, False).peak.total) - 1)
    assert tight
    assert tight.execution.recompute
    assert chosen(given, tight.limit, recompute_choices=(False,)) is None


def chosen_least(given: Workload, recompute: bool) -> MemoryPlan:
    found = chosen(given, tolerance=100.0, recompute_choices=(recompute,))
    assert found
    return found


def test_logits_are_held_in_smaller_chunks_where_they_must_be() -> None:
    mask = np.array([0] + [1] * 299, dtype=np.uint8)
    one = Example(1, np.arange(300, dtype=np.int32), mask)
    given = Workload([StepLengths.of([one])], (BatchLoad.single(300, 299),))
    large = shapes(vocab=100_000, itemsize=2)
    free = chosen(given, execution=GRAPH, of=large)
    tight = chosen(given, 30_000_000, execution=GRAPH, of=large)
    assert free
    assert tight
    assert free.execution.loss_chunk == 256
    assert tight.execution.loss_chunk < 64


def test_longest_example_of_the_data_has_to_fit_too() -> None:
    given = work(40, 40)
    plan = chosen(given)
    assert plan
    rare = replace(given, alone=(BatchLoad.single(4000, 2),))
    longer = chosen(rare)
    assert longer
    assert longer.peak.total > plan.peak.total
    assert chosen(rare, plan.limit and plan.peak.total) is None


@given(st.lists(st.integers(3, 200), min_size=1, max_size=6), st.integers(55_000, 800_000))
def test_chosen_plan_fits_with_a_margin_if_any_does(lengths: list[int], limit: int) -> None:
    given = work(*lengths)
    found, roomy = chosen(given, limit), chosen(given, int(limit / (1 + MARGIN)))
    assert found == chosen(given, limit)
    if found is not None:
        assert found.peak.total <= limit
    if roomy is not None:
        assert found is not None
        assert found.peak.total <= limit / (1 + MARGIN)


def test_counts_match_the_steps() -> None:
    plan = chosen(work(50, 50, 30, steps=3), tolerance=0.0)
    assert plan
    # Tokens after the last supervised one do not run; here, only the last token.
    assert plan.forward_fraction * 130 * (1 - plan.padding_fraction) == pytest.approx(127)
    assert plan.micro_batches_per_step in (1, 2, 3)


def test_without_data_one_example_is_planned_for() -> None:
    plan = chosen(Workload([], (BatchLoad.single(512, 512),)))
    assert plan
    assert plan.execution.micro_batch_tokens == 512
    assert not plan.execution.recompute


def test_only_the_first_steps_are_planned() -> None:
    steps = [StepLengths.of([example(9)] * 100)] * 50
    assert sample_steps(iter(steps)) == steps[:3]
    large = StepLengths.of([example(9)] * 4000)
    assert sample_steps([large] * 2) == [StepLengths.of([example(9)] * 256)]


def test_remedies_name_values_that_fit() -> None:
    given, execution = work(400), LEAN
    limit = 300_000
    message = why_not(shapes(), given, execution, limit, False)
    assert re.search(r"one example of 400 tokens needs about \d+ kB, of which", message)
    assert "raise --memory-limit" in message
    tokens = int(message.split("--max-seq-len ")[1].split(",")[0])

    def fits(n: int) -> bool:
        shorter = replace(given, steps=[], alone=(BatchLoad.single(n, max(2 * n // 400, 1)),))
        return chosen(shorter, limit, recompute_choices=(False,)) is not None

    assert fits(tokens)
    assert not fits(tokens + 1)


def test_recomputation_is_advised_where_it_was_off_and_would_do() -> None:
    given, execution = work(400), LEAN
    limit = chosen_least(given, True).peak.total
    assert "--grad-checkpoint on" in why_not(shapes(), given, execution, limit, False)
    assert "--grad-checkpoint" not in why_not(shapes(), given, execution, limit - 1, True)


def test_quantizing_is_advised_unless_the_base_is_quantized() -> None:
    given, execution = work(40), LEAN
    heavy = shapes(weights=10**9)
    assert "--quantize 4 (about 156 MB)" in why_not(heavy, given, execution, 2 * 10**8, True)
    assert "still too much" in why_not(heavy, given, execution, 10**8, True)
    quantized = replace(heavy, stored_itemsize=0)
    assert "quantised" not in why_not(quantized, given, execution, 2 * 10**8, True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("limit", [10**6, 10**8, 10**9, 10**10])
def test_longest_example_fits_and_one_token_more_does_not(limit: int, recompute: bool) -> None:
    execution, most = Execution(LEAN_OPERATIONS), 100_000
    found = max_example_length(shapes(), execution, limit, most, [recompute])

    def fits(tokens: int) -> bool:
        given = Workload((), (BatchLoad.single(tokens, tokens),))
        plan = choose_memory_plan(
            shapes(), given, execution, limit=limit, recompute_choices=[recompute], tolerance=0.0
        )
        return plan is not None and plan.peak.total * (1 + MARGIN) <= limit

    assert found == 0 or fits(found)
    assert found == most or not fits(found + 1)


def test_measurement_decides_only_which_plans_fit() -> None:
    """A measurement differs a little each time, and a different plan would round differently."""
    given = work(*[64] * 8)
    measured = [
        None,
        MemoryCorrection(again=Factors(tokens=50.0)),
        MemoryCorrection(kept=Factors(tokens=0.02)),
    ]
    of = [replace(shapes(), measured=each) for each in measured]
    plans = [chosen(given, of=each, execution=GRAPH, tolerance=1.0) for each in of]
    first, costly, cheap = plans
    assert first is not None
    assert costly is not None
    assert cheap is not None
    assert first.execution == costly.execution == cheap.execution
    assert costly.peak.total > first.peak.total
    tight = chosen(given, first.peak.total, of=of[1], execution=GRAPH, tolerance=1.0)
    assert tight is None or tight.execution != first.execution
