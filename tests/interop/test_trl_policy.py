"""The policy losses against TRL's GRPOTrainer on torch: advantages, ratios, loss and gradients.

TRL gets the samples in place of its own generation; it computes rewards, advantages, old and
reference log-probabilities, and the loss itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config.objective_config import PolicyConfig
from mlxtune.core.objectives.policy import (
    PolicyObjective,
    SampledExample,
    SampleTotals,
    advantages_of,
)
from tests.backend.step.executions import model_folder
from tests.interop.test_family_peft import give, parameters, tensor_of
from tests.interop.trl_steps import CONFIG, POLICY, RATE, TARGETS
from tests.models import VOCAB_SIZE
from tests.slow import slow_except

torch = pytest.importorskip("torch", reason="compares with TRL, which needs torch")
trl = pytest.importorskip("trl", reason="compares with TRL")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

# The libraries warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")
GROUP, MAX_TOKENS = 4, 9
# Large enough that the first update moves some ratios beyond their bounds.
_RATE = 15 * RATE
# By group: unequal rewards, equal rewards, and one sample apart from the others.
REWARDS = ((1.0, 0.0, 0.5, -2.0), (0.3, 0.3, 0.3, 0.3), (0.0, 0.0, 0.0, 1.0))


@dataclass(frozen=True)
class Case:
    """Our options, and the attributes that make TRL's trainer do the same."""

    ours: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)


_LOSSES = {
    "dapo": Case({"grpo_loss": "dapo"}, {"loss_type": "dapo"}),
    "grpo": Case({"grpo_loss": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": Case({"grpo_loss": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "gspo": Case(
        {"grpo_loss": "gspo", "clip_low": 0.2, "clip_high": 0.5},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.2,
            "epsilon_high": 0.5,
        },
    ),
}
_BOUNDS = {"clip_low": 0.1, "clip_high": 0.3}, {"epsilon_low": 0.1, "epsilon_high": 0.3}


def with_options(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> Case:
    return Case({**_LOSSES[name].ours, **ours}, {**_LOSSES[name].theirs, **theirs})


CASES = {
    **_LOSSES,
    **{
        f"{name}, KL": with_options(name, {"kl": 0.3, **_BOUNDS[0]}, {"beta": 0.3, **_BOUNDS[1]})
        for name in _LOSSES
    },
    **{
        f"dapo, scale {scale}": with_options(
            "dapo", {"scale_rewards": scale}, {"scale_rewards": scale}
        )
        for scale in ("batch", "none")
    },
    **{
        f"{name}, truncated": with_options(
            name, {"mask_truncated": True}, {"mask_truncated_completions": True}
        )
        for name in _LOSSES
    },
    **{
        f"{name}, temperature": with_options(
            name,
            {"temperature": 0.7, "kl": 0.3, **_BOUNDS[0]},
            {"beta": 0.3, **_BOUNDS[1]},
        )
        for name in ("dapo", "gspo")
    },
    "dapo, corrected": with_options("dapo", {"correct": True}, {"use_vllm": True}),
}
FAST = ("dapo", "gspo, KL", "dr_grpo, truncated", "dapo, temperature", "dapo, corrected")


@dataclass(frozen=True)
class Sample:
    """A sampled answer of `group`, which `finished` or was cut."""

    group: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    sampled: tuple[float, ...]
    finished: bool
    reward: float


@cache
def end_token() -> int:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder("qwen3"))
    return int(tokenizer.eos_token_id)


def samples() -> list[Sample]:
    """Return groups of samples of unequal lengths; the longest answers were cut."""
    rng, found = np.random.default_rng(3), []
    for group, rewards in enumerate(REWARDS):
        prompt = tuple(rng.integers(5, VOCAB_SIZE, 4 + 3 * group).tolist())
        for number, reward in enumerate(rewards):
            length = MAX_TOKENS if number == 2 else 1 + (2 * group + 3 * number) % (MAX_TOKENS - 1)
            answer = [t for t in rng.integers(5, VOCAB_SIZE, length).tolist() if t != end_token()]
            if number != 2:
                answer[-1:] = [end_token()]
            sampled = (-3 + rng.normal(size=len(answer))).tolist()
            found.append(Sample(group, prompt, tuple(answer), tuple(sampled), number != 2, reward))
    return found


def our_pipeline(case: Case) -> InstructPipeline:
    """Return a pipeline of a policy, whose reference is the base."""
    options = PolicyConfig(max_new_tokens=MAX_TOKENS, **case.ours)
    made = InstructPipeline(
        load_base(model_folder("qwen3"), "float32").model,
        CONFIG,
        objective=PolicyObjective(options),
    )
    rng = np.random.default_rng(POLICY)
    filled = [
        (name, mx.array(0.2 * rng.standard_normal(value.shape), dtype=mx.float32))
        for name, value in tree_flatten(made.model.trainable_parameters())
    ]
    made.model.update(tree_unflatten(filled))
    return made


def our_examples(policy: InstructPipeline, case: Case) -> list[SampledExample]:
    """Return the samples as a step's examples, with all log-probabilities that it may need."""
    options = PolicyConfig(**case.ours)
    advantages = advantages_of(REWARDS, options.scale_rewards)
    examples = []
    for sample, advantage in zip(samples(), [a for g in advantages for a in g], strict=True):
        tokens = np.array([*sample.prompt, *sample.answer], dtype=np.int32)
        mask = np.repeat(np.uint8([0, 1]), [len(sample.prompt), len(sample.answer)])
        examples.append(
            SampledExample(
                sample.group + 1,
                tokens,
                mask,
                advantage=advantage,
                logps=np.array(sample.sampled, dtype=np.float32),
                masked=options.mask_truncated and not sample.finished,
            )
        )
    old = policy.token_logps(examples)
    before = policy.token_logps(examples, before_training=True) if options.kl else [None] * 12
    return [
        replace(example, old_logps=logps, reference_logps=reference)
        for example, logps, reference in zip(examples, old, before, strict=True)
    ]


@cache
def trainer_of(temperature: float) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder("qwen3"), dtype=torch.float32
    )
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM", lora_dropout=0.0
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder("qwen3"))
    tokenizer.pad_token = tokenizer.eos_token
    args = trl.GRPOConfig(
        str(model_folder("qwen3") / "trl"),
        per_device_train_batch_size=3 * GROUP,
        num_generations=GROUP,
        max_completion_length=MAX_TOKENS,
        num_iterations=2,
        temperature=temperature,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
    )
    return trl.GRPOTrainer(
        model=peft.get_peft_model(base, lora),
        reward_funcs=lambda **_: [reward for group in REWARDS for reward in group],
        args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": "none"}] * 12),
        processing_class=tokenizer,
    )


_DEFAULTS = {
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "scale_rewards": "group",
    "mask_truncated_completions": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "current_gradient_accumulation_steps": 1,
}


def their_batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """Return TRL's trainer with our policy, and the batch that it makes of the samples."""
    # TRL gives the head its temperature when it makes a trainer.
    trainer = trainer_of(case.ours.get("temperature", 1.0))
    give(trainer.model, our_pipeline(case))
    for name, value in {**_DEFAULTS, **case.theirs}.items():
        monkeypatch.setattr(trainer, name, value, raising=False)
    given: Sequence[Sample] = samples()

    def generated(prompts: Any) -> tuple[Any, ...]:
        return (
            [list(each.prompt) for each in given],
            [list(each.answer) for each in given],
            None,
            [""] * len(given),
            [list(each.sampled) for each in given],
            {},
            None,
            None,
        )

    monkeypatch.setattr(trainer, "_generate", generated)
    trainer._metrics["train"].clear()
    trainer.model.train()
    return trainer, trainer._generate_and_score_completions([{"prompt": "none"}] * len(given))


def largest(found: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest expected entry or 1e-3."""
    found, expected = np.asarray(found), np.asarray(expected)
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-3))


# `pytest -s` prints the largest deviations.
@pytest.mark.parametrize("name", slow_except(CASES, *FAST))
def test_two_updates_match_trl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second update has ratios away from 1, which are clipped."""
    case = CASES[name]
    policy = our_pipeline(case)
    examples = our_examples(policy, case)
    trainer, batch = their_batch(case, monkeypatch)
    found = {
        "advantages": largest([each.advantage for each in examples], batch["advantages"]),
        "old": max(
            largest(ours.old_logps, theirs[: len(ours.old_logps)])
            for ours, theirs in zip(examples, batch["old_per_token_logps"].numpy(), strict=True)
            if not ours.masked and ours.old_logps is not None
        ),
    }
    start = parameters(policy)
    optimizer = torch.optim.AdamW(
        [tensor_of(trainer.model, each) for each in start], lr=_RATE, weight_decay=0.0
    )
    for update in (1, 2):
        optimizer.zero_grad()
        trainer._metrics["train"].clear()
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        theirs = {n: tensor_of(trainer.model, n).grad.numpy().T for n in start}
        ours = policy.loss_and_gradients(examples, step=update)
        gradients = {n: np.array(value) for n, value in tree_flatten(ours.gradients)}
        metrics = ours.step_loss.metrics(ours.values)
        expected = {key: each[-1] for key, each in trainer._metrics["train"].items()}
        found[f"loss {update}"] = largest(ours.loss, float(loss.detach()))
        most = max(np.abs(each).max() for each in theirs.values())
        assert most > 1e-3 or update == 2  # all ratios may be clipped
        found[f"gradients {update}"] = max(
            float(np.abs(gradients[n] - theirs[n]).max() / max(most, 1e-3)) for n in start
        )
        for metric in ("clip_ratio/low_mean", "clip_ratio/high_mean", "kl"):
            assert (metric in metrics) == (metric in expected)
            if metric in metrics:
                found[f"{metric} {update}"] = largest(metrics[metric], expected[metric])
        if update == 2:
            clipped = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
            assert clipped > 0
        optimizer.step()
        policy.train_batch(examples, step=update, learning_rate=_RATE)
    print(f"\n{name}: " + ", ".join(f"{k} {v:.1e}" for k, v in found.items()), end="")
    assert all(value <= 1e-4 for value in found.values()), found


def test_totals_match_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["dapo, truncated"]
    examples = our_examples(our_pipeline(case), case)
    _, batch = their_batch(case, monkeypatch)
    assert SampleTotals.of(examples).tokens == int(batch["num_items_in_batch"])
