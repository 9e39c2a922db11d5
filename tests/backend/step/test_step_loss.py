"""Steps of preferences equal plain autograd, however they are split."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.config.objective_config import LABEL_OBJECTIVES, PAIR_OBJECTIVES
from mlxtune.core.data.conversation import CHOSEN, DESIRABLE, MISMATCHED, REJECTED
from mlxtune.core.data.encode import Example
from mlxtune.core.objectives.objective import Objective
from mlxtune.errors import ModelError
from tests.backend.step.executions import (
    WAYS,
    assert_same,
    assert_same_gradients,
    computed,
    fixed_step,
    fresh,
    gradients_of,
    model_folder,
    pipeline,
)
from tests.backend.step.preferences import objective_of, rows_of
from tests.slow import long, slow

# One objective for each kind of loss: of single rows, across rows, with a divergence, with the NLL
# of prompt and answer, and by the mean log-probability of a token.
OBJECTIVES = {
    "dpo": objective_of("dpo", sft_weight=0.5),
    "aot": objective_of("dpo", dpo_loss="aot"),
    "kto": objective_of("kto", desirable_weight=2.0),
    "orpo": objective_of("orpo", orpo_nll="prompt"),
    "simpo": objective_of("simpo"),
}


@cache
def expected(name: str) -> tuple[float, dict[str, Any]]:
    """Return the loss and gradients of a step, from all logits of one example at a time."""
    objective, made = OBJECTIVES[name], pipeline("qwen3")
    examples = rows_of(objective)
    training = [each for each in examples if each.role != MISMATCHED]

    def logp(example: Example) -> mx.array:
        tokens = mx.array(example.tokens)
        logits = made.model(tokens[None, :-1])[0].astype(mx.float32)
        each = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        each = mx.take_along_axis(each, tokens[1:, None], axis=-1)[:, 0]
        return (each * mx.array(example.assistant_mask[1:].astype(np.float32))).sum()

    kl = 0.0
    if objective.needs_kl:
        others = [each for each in examples if each.role == MISMATCHED]
        kl = max(float(np.mean([float(logp(other)) - other.reference for other in others])), 0.0)

    def loss(parameters: Any) -> mx.array:
        made.model.update(parameters)
        return formula(name, objective, training, [logp(each) for each in training], kl)

    value, gradients = mx.value_and_grad(loss)(made.model.trainable_parameters())
    return float(value), gradients_of(gradients)


def formula(
    name: str, objective: Objective, examples: list[Example], logps: list[mx.array], kl: float
) -> mx.array:
    """Return the loss by the papers' formulas."""
    beta = objective.options.effective_beta

    def nls(x: mx.array) -> mx.array:
        return mx.log1p(mx.exp(-x))

    found = dict(zip([(each.row, each.role) for each in examples], logps, strict=True))
    given = {(each.row, each.role): each for each in examples}
    rows = sorted({each.row for each in examples})
    if name == "kto":
        losses = []
        for example, value in zip(examples, logps, strict=True):
            gain = beta * (value - example.reference - kl)
            good = example.role == DESIRABLE
            losses.append(2.0 * mx.sigmoid(-gain) if good else mx.sigmoid(gain))
        return sum(losses) / len(losses)
    chosen, rejected = ([found[row, role] for row in rows] for role in (CHOSEN, REJECTED))
    sizes = [[given[row, role].supervised for row in rows] for role in (CHOSEN, REJECTED)]
    refs = [[given[row, role].reference for row in rows] for role in (CHOSEN, REJECTED)]
    if name == "dpo":
        deltas = [c - r - (a - b) for c, r, a, b in zip(chosen, rejected, *refs, strict=True)]
        nll = -sum(chosen) / sum(sizes[0])
        return sum(nls(beta * delta) for delta in deltas) / len(rows) + 0.5 * nll
    if name == "aot":
        policy = [c - r for c, r in zip(chosen, rejected, strict=True)]
        order = np.argsort([float(mx.stop_gradient(each)) for each in policy])
        reference = sorted(a - b for a, b in zip(*refs, strict=True))
        deltas = [policy[i] - b for i, b in zip(order.tolist(), reference, strict=True)]
        return sum(nls(beta * delta) for delta in deltas) / len(rows)
    means = [(c / a, r / b) for c, r, a, b in zip(chosen, rejected, *sizes, strict=True)]
    if name == "simpo":
        return sum(nls(beta * (c - r) - 1.0) for c, r in means) / len(rows)
    whole = [each for each in examples if each.role not in (CHOSEN, REJECTED)]
    nll = -sum(found[each.row, each.role] for each in whole) / sum(e.supervised for e in whole)
    odds = [(c - r) - (mx.log(1 - mx.exp(c)) - mx.log(1 - mx.exp(r))) for c, r in means]
    return nll + beta * sum(map(nls, odds)) / len(rows)


SOME = ("packed", "split head", "all")
# By default, each objective runs packed, in two micro-batches; dpo and kto also run in other ways.
CASES = [
    (name, way, tokens)
    if (tokens == 64 and way in SOME[:1])
    or (name in ("dpo", "kto") and way in SOME[: len(SOME) if tokens == 64 else 1])
    else slow(name, way, tokens)
    if tokens == 64
    else long(name, way, tokens)
    for name in OBJECTIVES
    for way in (*SOME, "packed with recompute", "recompute")
    for tokens in (10_000, 64, 1)
]


@pytest.mark.parametrize(("name", "way", "tokens"), CASES)
def test_step_equals_plain_autograd_for_every_split(name: str, way: str, tokens: int) -> None:
    """The step is split into one or two micro-batches, or into one for each example."""
    made = fresh(model_folder("qwen3"), WAYS[way], tokens=tokens, objective=OBJECTIVES[name])
    loss, gradients = expected(name)
    found = computed(made, rows_of(OBJECTIVES[name]))
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(found.gradients, gradients)


@pytest.mark.parametrize("name", ["dpo", "aot"])
def test_dropout_of_a_split_step_matches_the_whole_step(name: str) -> None:
    folder, how = model_folder("qwen3"), WAYS["packed"]
    options: dict[str, Any] = {"objective": OBJECTIVES[name], "dropout": 0.3}
    whole, split = (fresh(folder, how, tokens, **options) for tokens in (10_000, 1))
    step = rows_of(OBJECTIVES[name])
    assert_same(computed(split, step), computed(whole, step))


def test_prompt_runs_once_and_another_answer_gets_no_gradient() -> None:
    made = fresh(model_folder("qwen3"), WAYS["packed"], 10_000, objective=OBJECTIVES["dpo"])
    step = rows_of(OBJECTIVES["dpo"])
    # An answer's last token is only predicted, so it does not run.
    prompts = {each.row: int(each.assistant_mask.argmax()) for each in step}
    answers = sum(each.supervised - 1 for each in step)
    assert computed(made, step).forward_tokens == sum(prompts.values()) + answers
    kto = fresh(model_folder("qwen3"), WAYS["packed"], 10_000, objective=OBJECTIVES["kto"])
    step = rows_of(OBJECTIVES["kto"])
    trained = [each for each in step if each.role != MISMATCHED]
    assert computed(kto, step).forward_tokens == sum(len(array) - 1 for array in trained)
    result = kto.train_batch(step, step=2)
    assert result.total_tokens == sum(map(len, trained))
    assert result.metrics["kl"] >= 0


def test_evaluation_is_the_loss_of_a_step() -> None:
    for name, objective in OBJECTIVES.items():
        made = fresh(model_folder("qwen3"), WAYS["packed"], 64, objective=objective)
        found = made.evaluate(rows_of(objective))
        assert found.avg_loss == pytest.approx(expected(name)[0], rel=1e-5)
        assert {"logps/chosen", "rewards/chosen"} <= found.metrics.keys()


def test_first_step_finds_a_reference_of_another_model() -> None:
    made = fresh(model_folder("qwen3"), WAYS["packed"], 10_000, objective=OBJECTIVES["dpo"])
    step = rows_of(OBJECTIVES["dpo"])
    logps = made.logps(step)
    right = [replace(e, reference=float(p)) for e, p in zip(step, logps, strict=True)]
    before = dict(tree_flatten(made.model.trainable_parameters()))
    wrong = [replace(each, reference=each.reference + 0.01 * each.role) for each in right]
    with pytest.raises(ModelError, match=r"the first loss is .*, but should be"):
        made.train_batch(wrong, step=1)
    assert all(
        mx.array_equal(before[name], value)
        for name, value in tree_flatten(made.model.trainable_parameters())
    )
    assert made.train_batch(right, step=1).metrics["rewards/chosen"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("name", ["sft", *PAIR_OBJECTIVES, *LABEL_OBJECTIVES])
def test_steps_of_all_objectives_but_sft_have_metrics(name: str) -> None:
    """So lines of metrics.jsonl need not say whether a loss is of rows."""
    objective = objective_of(name)
    made = fresh(model_folder("qwen3"), WAYS["packed"], 10_000, objective=objective)
    step = fixed_step() if objective.is_sft else rows_of(objective)
    assert bool(made.train_batch(step, step=2).metrics) is not objective.is_sft
