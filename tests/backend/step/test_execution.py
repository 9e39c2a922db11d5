"""Each way of computing a step, alone and combined, against the plain path."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from tests.backend.step.executions import (
    PLAIN,
    WAYS,
    assert_same,
    computed,
    first_supervised,
    fixed_step,
    pipeline,
    plain_step,
    steps,
)
from tests.slow import long, slow, slow_except

ARCHITECTURES = ("qwen3", "llama", "gemma2", "gemma3_text")
PACKED = [name for name, how in WAYS.items() if how.packs]
ALL = WAYS["all"]
SOME = ("split head", "recompute", "cpu kernels", "packed", "all")
few = settings(
    max_examples=4, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


# By default, one architecture runs in some ways, and the others in the full combination; slow tests
# run the one in all ways, and the others in some.
STEPS = [
    each
    if each[1] == "all" or (each[0] == "gemma3_text" and each[1] in SOME)
    else slow(*each)
    if each[0] == "gemma3_text" or each[1] in SOME
    else long(*each)
    for each in product(ARCHITECTURES, WAYS)
]


@pytest.mark.parametrize(("architecture", "way"), STEPS)
def test_step_equals_the_plain_one(architecture: str, way: str) -> None:
    fast = pipeline(architecture, WAYS[way], tokens=10_000)
    assert_same(computed(fast, fixed_step()), plain_step(architecture))


@pytest.mark.parametrize("way", slow_except(WAYS, *SOME))
def test_supervised_first_token_changes_neither_loss_nor_count(way: str) -> None:
    """Nothing predicts an example's first token, whether padded, packed or in a shared prefix."""
    fast = pipeline("gemma3_text", WAYS[way], tokens=10_000)
    examples = [first_supervised(example) for example in fixed_step()]
    assert_same(computed(fast, examples), plain_step("gemma3_text"))


@pytest.mark.parametrize("architecture", slow_except(ARCHITECTURES, "gemma3_text"))
@given(
    examples=steps(),
    way=st.sampled_from(list(WAYS)),
    tokens=st.sampled_from([1, 40, 10_000]),
    quantize=st.sampled_from([None, 4]),
)
@few
def test_any_step_equals_the_plain_one(
    architecture: str, examples: list[Example], way: str, tokens: int, quantize: int | None
) -> None:
    fast = pipeline(architecture, WAYS[way], tokens=tokens, quantize=quantize)
    plain = pipeline(architecture, quantize=quantize)
    assert_same(computed(fast, examples), computed(plain, examples))


@pytest.mark.parametrize("way", ["packed with recompute", "all"])
@pytest.mark.parametrize("architecture", slow_except(ARCHITECTURES, "qwen3"))
def test_quantized_step_equals_the_plain_one(architecture: str, way: str) -> None:
    fast = pipeline(architecture, WAYS[way], tokens=10_000, quantize=4)
    assert_same(computed(fast, fixed_step()), plain_step(architecture, 4))


@pytest.mark.parametrize("way", slow_except(WAYS, *SOME))
def test_dropout_matches_the_plain_step(way: str) -> None:
    fast = pipeline("gemma3_text", WAYS[way], tokens=10_000, dropout=0.3)
    found = computed(fast, fixed_step())
    assert_same(found, plain_step("gemma3_text", dropout=0.3))
    assert abs(found.loss - plain_step("gemma3_text").loss) > 1e-3


@given(examples=steps(), way=st.sampled_from(PACKED), architecture=st.sampled_from(ARCHITECTURES))
@few
def test_dropout_of_any_packed_step(examples: list[Example], way: str, architecture: str) -> None:
    fast = pipeline(architecture, WAYS[way], tokens=10_000, dropout=0.3)
    plain = pipeline(architecture, dropout=0.3)
    assert_same(computed(fast, examples), computed(plain, examples))


@pytest.mark.parametrize(
    "trained",
    [
        {"targets": ("q_proj", "v_proj")},
        {"targets": ("down_proj",)},
        {"num_layers": 1},
        {"targets": ("q_proj", "v_proj"), "num_layers": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["packed with recompute", slow("cpu kernels")])
def test_trains_for_any_targets(way: str, trained: dict[str, Any]) -> None:
    fast = pipeline("gemma3_text", WAYS[way], tokens=10_000, **trained)
    assert_same(computed(fast, fixed_step()), plain_step("gemma3_text", **trained))


NAMED = {"packed": WAYS["packed"], "all": ALL, "plain": PLAIN}


@pytest.mark.parametrize("how", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("tokens", [slow(1), 40])
def test_micro_batches_of_any_size(how: Execution, tokens: int) -> None:
    for fixed_cost in (32, 4):
        fast = pipeline("gemma3_text", how, tokens=tokens, fixed_cost=fixed_cost)
        assert_same(computed(fast, fixed_step()), plain_step("gemma3_text"))


@pytest.mark.parametrize("way", PACKED)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_sequence_runs_shared_tokens_once(architecture: str, way: str) -> None:
    beginnings = {
        tuple(one.tokens[: i + 1].tolist()) for one in fixed_step() for i in range(len(one) - 1)
    }
    fast = pipeline(architecture, WAYS[way], tokens=10_000)
    result = fast.loss_and_gradients(fixed_step(), step=3)
    assert result.counts.forward_tokens == len(beginnings)
    assert result.counts.padding == 0


def test_dropout_shares_prefixes_only_within_a_row() -> None:
    way = WAYS["packed"]
    rows = [replace(example, row=i) for i, example in enumerate(fixed_step())]
    fast = pipeline("gemma3_text", way, tokens=10_000, dropout=0.3)
    shared = computed(fast, fixed_step()).forward_tokens
    apart = computed(fast, rows)
    assert apart.forward_tokens == sum(len(example) - 1 for example in rows) > shared
    assert_same(apart, computed(pipeline("gemma3_text", dropout=0.3), rows))


@pytest.mark.parametrize("way", ["split head", *PACKED])
def test_evaluation_equals_the_plain_one(way: str) -> None:
    fast = pipeline("gemma3_text", WAYS[way], tokens=100, dropout=0.3)
    result = fast.evaluate(fixed_step())
    expected = pipeline("gemma3_text").evaluate(fixed_step())
    assert result.avg_loss == pytest.approx(expected.avg_loss, rel=1e-5)
    assert result.total_response_tokens == expected.total_response_tokens
    assert result.total_tokens == expected.total_tokens


def test_requested_execution_is_used() -> None:
    for name, how in WAYS.items():
        found = pipeline("gemma3_text", how, tokens=10_000).forward.execution
        assert found == replace(how, micro_batch_tokens=10_000, fixed_cost=0), name
