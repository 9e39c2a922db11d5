"""The loss of a policy on answers that it sampled, from their rewards: GRPO and its relatives.

A group is one prompt with its sampled answers. An answer's advantage is its reward relative to its
group's; each of its tokens gets a loss from the advantage and from the ratio of the token's
probabilities, trained model over the model that sampled it.

Sources: TRL 1.16 (`GRPOTrainer`), whose names the losses have, and the papers that it cites: GRPO
(arXiv:2402.03300), DAPO (arXiv:2503.14476), Dr. GRPO (arXiv:2503.20783), GSPO (arXiv:2507.18071).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.config.objective_config import ObjectiveConfig, PolicyConfig
from mlxtune.core.data.encode import Example, predicted_tokens
from mlxtune.core.objectives.objective import SFT, Objective

# TRL adds this to a standard deviation before it divides by it.
_EPSILON = 1e-4
# The largest weight of a token with --correct, TRL's default.
MAX_CORRECTION = 3.0
# The largest reward: an advantage may be twice as large, and is used in float32.
MAX_REWARD = 1e38


@dataclass(frozen=True)
class SampleRequest:
    """A request for one sampled answer to a prompt, of which `prompt` are the tokens.

    `seeds` are the numbers on which the sample depends besides the model and the prompt.
    """

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]

    def keys(self, count: int) -> npt.NDArray[np.uint32]:
        """Return a random key for each of `count` tokens, uint32 (count, 2)."""
        words = np.random.SeedSequence(self.seeds).generate_state(2 * count)
        return words.astype(np.uint32).reshape(count, 2)


@dataclass(frozen=True)
class SampledAnswer:
    """A sampled answer: its tokens as generated, and the log-probability of each.

    A `finished` answer ends with the token that ended it; otherwise, its length was limited.
    """

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    finished: bool


@dataclass(frozen=True, slots=True, eq=False)
class SampledExample(Example):
    """A sampled answer behind its prompt; the answer's tokens are the supervised tokens.

    `logps` (A,) are the log-probabilities of these tokens when they were sampled, float32.
    `old_logps` are those under the trained model before the first update on the sample, if there
    are several updates, and `reference_logps` those under the model before its first step, if the
    divergence is weighted. A `masked` sample has no loss, but counts as an answer.
    """

    advantage: float = 0.0
    logps: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    old_logps: npt.NDArray[np.float32] | None = None
    reference_logps: npt.NDArray[np.float32] | None = None
    masked: bool = False

    @property
    def has_gradient(self) -> bool:
        return has_gradient(self.masked, self.advantage, self.reference_logps is not None)


def has_gradient(masked: bool, advantage: float, has_divergence: bool) -> bool:
    """Return whether a sample has a part in a step's gradient.

    A sample without an advantage has one only from its divergence from the reference.
    """
    return not masked and (advantage != 0 or has_divergence)


def expected_samples(
    examples: Sequence[Example], group_size: int, max_new_tokens: int
) -> list[Example]:
    """Return the longest samples that a step of these rows may have, to plan its memory."""
    samples = []
    for example in examples:
        prompt = example.tokens[: int(example.assistant_mask.argmax())]
        mask = np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), max_new_tokens])
        for number in range(group_size):
            # Answers share no token.
            answer = np.full(max_new_tokens, number, dtype=np.int32)
            tokens = np.concatenate([prompt, answer])
            samples.append(replace(example, tokens=tokens, assistant_mask=mask))
    return samples


def advantages_of(
    groups: Sequence[Sequence[float | None]], scale_rewards: str = "group"
) -> list[list[float]]:
    """Return the advantage of each sample, from the rewards of each group.

    A sample without a reward has advantage 0, and the others of its group are compared among
    themselves. So has every sample of a group whose rewards are equal.
    """
    every = deviation([reward for group in groups for reward in group if reward is not None])
    advantages = []
    for group in groups:
        rewards = [reward for reward in group if reward is not None]
        if not rewards or min(rewards) == max(rewards):
            advantages.append([0.0] * len(group))
            continue
        divisors = {"group": deviation(rewards) + _EPSILON, "batch": every + _EPSILON}
        mean, divisor = float(np.mean(rewards)), divisors.get(scale_rewards, 1.0)
        advantages.append([0.0 if each is None else (each - mean) / divisor for each in group])
    return advantages


def deviation(rewards: Sequence[float]) -> float:
    """Return the standard deviation of a sample of rewards; 0 for fewer than two."""
    return float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0


@dataclass(frozen=True)
class SampleTotals:
    """Totals over all samples of a step, on which the loss of any subset depends.

    `samples` counts all answers, `tokens` the tokens of answers that are not masked.
    """

    samples: int
    tokens: int

    @classmethod
    def of(cls, examples: Sequence[SampledExample]) -> SampleTotals:
        counted = sum(predicted_tokens(example) for example in examples if not example.masked)
        return cls(len(examples), counted)


@dataclass(frozen=True, eq=False)
class TokenLogps:
    """The log-probabilities of samples' tokens, arrays (S, A) with zeros behind shorter answers.

    `mask` is 1 for each token. `advantages` and `counts`, the numbers of tokens, are (S, 1).
    `trained` are from the model in training, `old` from the model before the first update,
    `sampled` from sampling, and `reference`, if needed, from the model before its first step.
    Before `with_trained`, there are no `trained` ones, and no `old` ones before the first update.
    """

    old: Any
    sampled: Any
    reference: Any
    mask: Any
    advantages: Any
    counts: Any
    trained: Any = None

    @classmethod
    def of(cls, examples: Sequence[SampledExample]) -> TokenLogps:
        counts = np.array([predicted_tokens(example) for example in examples], dtype=np.int64)
        mask = np.arange(counts.max(initial=1)) < counts[:, None]

        def placed(name: str) -> Any:
            values = [getattr(example, name) for example in examples]
            if any(each is None for each in values):
                return None
            full = np.zeros(mask.shape)
            full[mask] = np.concatenate([*values, np.zeros(0)])
            return full

        return cls(
            placed("old_logps"),
            placed("logps"),
            placed("reference_logps"),
            mask.astype(np.float64),
            np.array([example.advantage for example in examples]).reshape(-1, 1),
            counts[:, None].astype(np.float64),
        )

    def with_trained(self, trained: Any, detached: Any, xp: Any = np) -> TokenLogps:
        """Return all log-probabilities, as arrays of the module `xp`.

        `detached` are the `trained` ones without a gradient: before the first update, they are the
        old ones.
        """
        values = {name: each for name, each in vars(self).items() if each is not None}
        if xp is not np:
            values = {name: xp.array(each.astype(np.float32)) for name, each in values.items()}
        return replace(self, **{"old": detached, **values, "trained": trained})


@dataclass(frozen=True)
class PolicyObjective:
    """The objective of sampled answers, with its options."""

    options: PolicyConfig

    name = "grpo"
    is_sft = needs_first_pass = needs_kl = has_pairs = False
    # The reference's log-probabilities are of sampled answers, which a run does not start with.
    needs_reference = False
    # Samples of a group run together, so that their prompt runs once.
    keeps_rows_whole = True

    @property
    def temperature(self) -> float:
        """Ratios compare the distributions from which answers are sampled, as in TRL."""
        return self.options.temperature

    @property
    def needs_reference_lora(self) -> bool:
        """Whether the loss needs the values of LoRA before the first step."""
        return self.options.kl > 0

    @property
    def by_answer(self) -> bool:
        """Whether an answer has one ratio, instead of one for each token."""
        return self.options.grpo_loss == "gspo"

    @property
    def description(self) -> str:
        options = self.options
        divergence = f", KL {options.kl:g}" if options.kl else ""
        return f"{self.name} ({options.grpo_loss}){divergence}"

    def loss(self, logps: TokenLogps, totals: SampleTotals, xp: Any = np) -> Any:
        """Return the part of a step's loss that these samples contribute, a scalar."""
        options, ratio = self.options, xp.exp(self._log_ratio(logps))
        clipped = xp.clip(ratio, 1 - options.clip_low, 1 + options.clip_high)
        losses = -xp.minimum(ratio * logps.advantages, clipped * logps.advantages)
        if options.correct:
            losses = losses * xp.minimum(xp.exp(logps.old - logps.sampled), MAX_CORRECTION)
        if options.kl:
            losses = losses + options.kl * self._divergence(logps, ratio, xp)
        return (losses * logps.mask * self._weights(logps, totals)).sum()

    def evaluate(
        self, examples: Sequence[Example], logps: npt.NDArray[np.float64]
    ) -> tuple[float, dict[str, float]]:
        """Return the cross-entropy of given answers: rewards judge a policy, not its loss."""
        return SFT.evaluate(examples, logps)

    def _log_ratio(self, logps: TokenLogps) -> Any:
        difference = logps.trained - logps.old
        if not self.by_answer:
            return difference
        return (difference * logps.mask).sum(axis=1, keepdims=True) / logps.counts

    def _weights(self, logps: TokenLogps, totals: SampleTotals) -> Any:
        """Return the weight of each token's loss, (S, 1) or a number."""
        if self.options.grpo_loss == "dapo":
            return 1 / totals.tokens
        if self.options.grpo_loss == "dr_grpo":
            return 1 / (totals.samples * self.options.max_new_tokens)
        return 1 / (totals.samples * logps.counts)

    def metrics(self, logps: TokenLogps, totals: SampleTotals) -> dict[str, float]:
        """Return TRL's metrics of a step from all its samples with a gradient, as numpy arrays.

        `ratio/…` compares probabilities in training, before the first update, with those in
        sampling: 2 stands for a factor of 2 in either direction.
        """
        tokens = logps.mask.sum()
        if not tokens:
            return {}
        ratio = np.exp(self._log_ratio(logps))
        low = (ratio < 1 - self.options.clip_low) & (logps.advantages < 0)
        high = (ratio > 1 + self.options.clip_high) & (logps.advantages > 0)
        apart = np.abs(logps.old - logps.sampled)[logps.mask > 0]
        values = {
            "clip_ratio/low_mean": self._fraction(low, logps, totals),
            "clip_ratio/high_mean": self._fraction(high, logps, totals),
            "ratio/mean": np.exp(apart.mean()),
            "ratio/max": np.exp(apart.max()),
        }
        if self.options.kl:
            values["kl"] = (self._divergence(logps, ratio, np) * logps.mask).sum() / tokens
        return {name: float(value) for name, value in values.items()}

    def _divergence(self, logps: TokenLogps, ratio: Any, xp: Any) -> Any:
        """Return the divergence of each token from the reference: k3 of Schulman's estimators.

        The ratio makes its gradient equal the reverse divergence's (arXiv:2512.02556).
        """
        difference = logps.reference - logps.trained
        return ratio * (xp.exp(difference) - difference - 1)

    def _fraction(self, clipped: Any, logps: TokenLogps, totals: SampleTotals) -> Any:
        """Return the fraction of all tokens, or of all answers, whose ratio is clipped."""
        if self.by_answer:
            return clipped.sum() / totals.samples
        return (clipped * logps.mask).sum() / totals.tokens


# What a step can minimise.
StepObjective = Objective | PolicyObjective


def objective_of(config: ObjectiveConfig) -> StepObjective:
    """Return the objective that the options of a run name."""
    if config.is_rewarded:
        return PolicyObjective(config.part(PolicyConfig))
    return Objective.of(config)
