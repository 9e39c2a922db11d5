"""Steps of sampled answers equal the plain path, however they are split."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.generate import Sampling
from mlxtune.config.objective_config import PolicyConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.objectives.policy import (
    PolicyObjective,
    SampledExample,
    SampleRequest,
    advantages_of,
)
from mlxtune.errors import ModelError
from tests.backend.step.executions import (
    PLAIN,
    WAYS,
    Step,
    assert_same,
    computed,
    fresh,
    model_folder,
)
from tests.backend.step.preferences import objective_of, rows_of
from tests.models import VOCAB_SIZE
from tests.slow import slow, slow_except

OBJECTIVES = {
    "dapo": PolicyObjective(PolicyConfig(kl=0.2, correct=True, temperature=0.7)),
    "gspo": PolicyObjective(PolicyConfig(grpo_loss="gspo")),
}
# The last group has equal rewards, and one sample of the first has none.
REWARDS = ((1.0, None, 0.0, 3.0), (0.2, 0.1, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))


def groups(prompt: int = 9, *, reference: bool = False) -> list[SampledExample]:
    """Return a step's samples: answers of 1 to 12 tokens behind a prompt for each group."""
    rng, examples = np.random.default_rng(2), []
    for row, (rewards, advantages) in enumerate(
        zip(REWARDS, advantages_of(REWARDS), strict=True), start=1
    ):
        tokens = rng.integers(0, VOCAB_SIZE, prompt)
        for number, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
            answer = rng.integers(0, VOCAB_SIZE, 1 + (5 * number + row) % 12)
            logps = rng.normal(-3, 1, (3, len(answer))).astype(np.float32)
            examples.append(
                SampledExample(
                    row,
                    np.concatenate([tokens, answer]).astype(np.int32),
                    np.repeat(np.uint8([0, 1]), [prompt, len(answer)]),
                    advantage=advantage,
                    logps=logps[0],
                    old_logps=logps[1],
                    reference_logps=logps[2] if reference else None,
                    masked=reward is None,
                )
            )
    return examples


def made(name: str, way: str = "packed", tokens: int = 10_000) -> InstructPipeline:
    return fresh(model_folder("qwen3"), WAYS[way], tokens, objective=OBJECTIVES[name])


def step_of(name: str) -> list[SampledExample]:
    return groups(reference=bool(OBJECTIVES[name].options.kl))


@cache
def expected(name: str) -> Step:
    """Return the step on the plain path, one sample at a time."""
    plain = fresh(model_folder("qwen3"), PLAIN, 1, objective=OBJECTIVES[name])
    return computed(plain, step_of(name))


@pytest.mark.parametrize(
    ("name", "way", "tokens"),
    [
        ("dapo", "packed", 64),
        ("gspo", "packed", 64),
        *(slow(name, way, 64) for name in OBJECTIVES for way in ("split head", "all")),
        *(slow(name, "packed", tokens) for name in OBJECTIVES for tokens in (1, 10_000)),
    ],
)
def test_step_equals_the_plain_path_for_every_split(name: str, way: str, tokens: int) -> None:
    assert_same(computed(made(name, way, tokens), step_of(name)), expected(name))


def test_prompt_runs_once_for_its_samples() -> None:
    step = [each for each in groups(prompt=40) if not each.masked]
    # A sample's last token is only predicted, so it does not run.
    most = 40 * 3 + sum(each.supervised - 1 for each in step)
    learned = [each for each in step if each.has_gradient]
    without_equal = 40 * 2 + sum(each.supervised - 1 for each in learned)
    assert computed(made("gspo"), step).forward_tokens == without_equal < most
    # Groups stay whole in micro-batches of several groups, and of one.
    for tokens in (70, 120):
        found = computed(made("gspo", tokens=tokens), step)
        assert found.forward_tokens == without_equal


def test_engine_and_loss_share_one_list_of_examples_with_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second filter could disagree on the indices of the examples in a micro-batch."""
    asked: list[int] = []
    for kind in (Example, SampledExample):
        real = kind.has_gradient.fget

        def counting(example: Example, real: Any = real) -> bool:
            asked.append(id(example))
            return bool(real(example))

        monkeypatch.setattr(kind, "has_gradient", property(counting))
    kto = objective_of("kto")
    for objective, step in ((kto, rows_of(kto)), (OBJECTIVES["gspo"], groups())):
        asked.clear()
        fresh(model_folder("qwen3"), WAYS["packed"], 64, objective=objective).train_batch(
            step, step=2
        )
        assert asked == list(map(id, step))


def test_step_of_a_policy_refuses_an_example_that_was_not_sampled() -> None:
    step = groups()
    plain = Example(9, step[0].tokens, step[0].assistant_mask)
    with pytest.raises(TypeError, match="not sampled"):
        computed(made("gspo"), [*step, plain])


def test_step_of_equal_rewards_runs_nothing_and_changes_nothing() -> None:
    pipeline = fresh(
        model_folder("qwen3"), WAYS["packed"], objective=OBJECTIVES["gspo"], weight_decay=0.0
    )
    before = dict(tree_flatten(pipeline.model.trainable_parameters()))
    result = pipeline.train_batch(groups()[8:], step=1)
    assert (result.avg_loss, result.grad_norm, result.run_tokens) == (0, 0, 0)
    assert result.total_response_tokens > 0
    assert all(
        mx.array_equal(before[name], value)
        for name, value in tree_flatten(pipeline.model.trainable_parameters())
    )


def test_log_probabilities_of_tokens_add_up_to_those_of_answers() -> None:
    pipeline, step = made("dapo", tokens=64), step_of("dapo")
    found = pipeline.token_logps(step)
    assert [len(each) for each in found] == [each.supervised for each in step]
    sums = [float(each.astype(np.float64).sum()) for each in found]
    assert sums == pytest.approx(pipeline.logps(step).tolist(), rel=1e-6)


def test_reference_model_is_the_start_after_updates() -> None:
    pipeline, step = made("dapo", tokens=64), step_of("dapo")
    before = pipeline.token_logps(step, before_training=True)
    pipeline.train_batch(step, step=1, learning_rate=0.1)
    after = pipeline.token_logps(step)
    again = pipeline.token_logps(step, before_training=True)
    assert all(map(np.array_equal, before, again))
    assert not any(map(np.array_equal, before, after))
    assert all(map(np.array_equal, after, pipeline.token_logps(step)))


@pytest.mark.parametrize("options", [{"init": "pissa"}, slow({"dora": True})])
def test_resumed_pipeline_reads_the_reference_lora(tmp_path: Path, options: dict[str, Any]) -> None:
    model, objective, step = model_folder("qwen3"), OBJECTIVES["dapo"], step_of("dapo")
    first = fresh(model, WAYS["packed"], objective=objective, **options)
    before = first.token_logps(step, before_training=True)
    first.train_batch(step, step=1, learning_rate=0.1)
    first.snapshot()(tmp_path)
    resumed = InstructPipeline(
        load_base(model, "float32").model,
        first.config,
        execution=WAYS["packed"],
        fresh=False,
        objective=objective,
    )
    resumed.restore(tmp_path)
    file, content = tmp_path / "initial", first.reference_lora_file()
    assert content is not None
    for problem in ("is missing", "has changed"):
        with pytest.raises(ModelError, match=f"initial, the model from .* {problem}: bring it"):
            resumed.load_reference_lora(file, sha256(content).hexdigest())
        file.write_bytes(content + b"?")
    file.write_bytes(content)
    resumed.load_reference_lora(file, sha256(content).hexdigest())
    assert resumed.reference_lora_file() == content
    found = resumed.token_logps(step, before_training=True)
    assert all(map(np.array_equal, found, before))
    assert made("gspo").reference_lora_file() is None


@pytest.mark.parametrize("way", ["packed", "split head", "plain"])
@pytest.mark.parametrize("model_type", slow_except(["qwen3", "gemma2"], "gemma2"))
def test_log_probabilities_are_those_at_the_sampling_temperature(way: str, model_type: str) -> None:
    """Gemma 2 caps its logits, so its hidden states must not be divided."""
    objective = PolicyObjective(PolicyConfig(temperature=0.5))
    model, step = model_folder(model_type), step_of("gspo")
    pipeline = fresh(model, {**WAYS, "plain": PLAIN}[way], 10_000, objective=objective)
    for example, found in zip(step[:3], pipeline.token_logps(step[:3]), strict=True):
        logits = np.array(pipeline.model(mx.array(example.tokens[None, :-1]))[0], dtype=np.float64)
        logps = logits / 0.5 - np.log(np.exp(logits / 0.5).sum(axis=-1, keepdims=True))
        expected = logps[np.arange(len(logps)), example.tokens[1:]][-example.supervised :]
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("way", slow_except(["packed", "all", "split head"], "packed"))
def test_samples_have_the_log_probabilities_of_training(way: str, temperature: float) -> None:
    """The policy that samples is the one that trains, between its updates too."""
    objective = PolicyObjective(PolicyConfig(grpo_loss="gspo", temperature=temperature))
    pipeline = fresh(model_folder("qwen3"), WAYS[way], 10_000, objective=objective)
    sampling = Sampling(max_new_tokens=9, temperature=temperature)
    prompts = [each.tokens[:9] for each in groups()[::4]]
    for step in (1, 2):
        requests = [
            SampleRequest(tuple(prompt.tolist()), (step, row, number))
            for row, prompt in enumerate(prompts)
            for number in range(4)
        ]
        answers = pipeline.sample(requests, sampling, frozenset(range(0, VOCAB_SIZE, 9)))
        examples = [
            SampledExample(
                row=i // 4 + 1,
                tokens=np.array([*request.prompt, *answer.tokens], dtype=np.int32),
                assistant_mask=np.repeat(np.uint8([0, 1]), [9, len(answer.tokens)]),
                advantage=float(i % 4 - 1.5),
                logps=np.array(answer.logps, dtype=np.float32),
            )
            for i, (request, answer) in enumerate(zip(requests, answers, strict=True))
        ]
        for example, logps in zip(examples, pipeline.token_logps(examples), strict=True):
            assert example.logps == pytest.approx(logps, abs=1e-4)
        result = pipeline.train_batch(examples, step=step, learning_rate=0.05)
        assert result.metrics["ratio/max"] == pytest.approx(1, abs=1e-3)
        assert result.metrics["clip_ratio/low_mean"] == 0
