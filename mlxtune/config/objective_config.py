"""Options of the objective: the function that a step minimises."""

import dataclasses
import re
from collections.abc import Callable, Iterator

from mlxtune.config.fields import CheckedConfig, flag
from mlxtune.config.option import INPUT, RESULT, TRAINING

# The objectives whose rows are pairs of answers, and the objectives whose rows have a label.
PAIR_OBJECTIVES, LABEL_OBJECTIVES = ("dpo", "orpo", "cpo", "simpo"), ("kto",)
# The objectives whose rows are prompts, to which the model samples answers.
REWARD_OBJECTIVES = ("grpo",)
REWARD_NAMES = (
    "FILE.py[:FUNCTION], exact, contains, regex=PATTERN, number, json, json_keys or length, each "
    "with an optional weight, such as json=0.5"
)
OBJECTIVES = ("sft", *PAIR_OBJECTIVES, *LABEL_OBJECTIVES, *REWARD_OBJECTIVES)
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?inf|nan")
_CODE = re.compile(r"(?P<file>.+\.py)(?::(?P<function>[^\W\d]\w*))?", re.DOTALL)
# The default peak learning rates: for `sft`, and for all other objectives.
DEFAULT_RATE, PREFERENCE_RATE = 1e-4, 5e-6


def is_rewarded(objective: object) -> bool:
    """Return whether an objective's rows are prompts, to which the model samples answers."""
    return objective in REWARD_OBJECTIVES


def parse_weight(reward: str) -> tuple[str, float]:
    """Return a reward without its weight, and the weight: the number after the last `=`, or 1."""
    named, equals, number = reward.rpartition("=")
    return (named, float(number)) if equals and NUMBER.fullmatch(number) else (reward, 1.0)


@dataclasses.dataclass(frozen=True)
class RewardText:
    """A reward as it is written, and its parts.

    `kind` is the name before the colon or, for a pattern, the equals sign, and `argument` the text
    behind it; for code, `argument` is the function's name. `file` is the path of the code or of a
    schema.
    """

    text: str
    kind: str
    argument: str
    weight: float
    file: str = ""
    is_code: bool = False

    def with_file(self, change: Callable[[str], str]) -> str:
        """Return the text with its file's path changed, if it names a file."""
        start = 0 if self.is_code else len(f"{self.kind}:")
        rest = self.text[start + len(self.file) :]
        return self.text[:start] + change(self.file) + rest if self.file else self.text


def parse_reward(text: str) -> RewardText:
    """Parse `FILE.py[:FUNCTION]` or a built-in reward, known or not, with an optional weight."""
    named, weight = parse_weight(text)
    if named.startswith("regex="):
        return RewardText(text, "regex", named.removeprefix("regex="), weight)
    if match := _CODE.fullmatch(named):
        function = match["function"] or ""
        return RewardText(text, "function", function, weight, match["file"], is_code=True)
    kind, _, argument = named.partition(":")
    return RewardText(text, kind, argument, weight, argument if kind == "json" else "")


def reward_weight(reward: str) -> float:
    return parse_weight(reward)[1]


def default_learning_rate(objective: object) -> float:
    """Return the default peak learning rate of an objective."""
    return (
        PREFERENCE_RATE
        if objective in (*PAIR_OBJECTIVES, *LABEL_OBJECTIVES, *REWARD_OBJECTIVES)
        else DEFAULT_RATE
    )


_BETA, _SIMPO_BETA = 0.1, 2.0
_DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "sppo_hard", "apo_zero"),
    *("apo_down", "aot", "aot_unpaired", "discopop", "sigmoid_norm"),
)
# The losses that label smoothing changes.
_SMOOTHED_LOSSES = ("exo_pair", "robust", "aot", "aot_unpaired")
_OBJECTIVES_OF_OPTION = {
    "dpo_loss": ("dpo",),
    "label_smoothing": ("dpo", "cpo", "simpo"),
    "sft_weight": ("dpo",),
    "orpo_nll": ("orpo",),
    "cpo_alpha": ("cpo", "simpo"),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "kto_loss": ("kto",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowObjectiveConfig(CheckedConfig):
    """The options of an objective that decide which rows are read and how they are encoded."""

    objective: str = TRAINING.option(
        "sft",
        "Training objective: sft learns answers; dpo, orpo, cpo and simpo learn to prefer a chosen "
        "answer over a rejected one; kto learns from labelled answers; grpo learns from rewards of "
        "answers that the model samples.",
        RESULT,
        encodes=True,
        choices=OBJECTIVES,
    )
    orpo_nll: str = TRAINING.option(
        "answer",
        "Tokens whose loss orpo adds: the chosen answer's, or also the prompt's, as in TRL.",
        RESULT,
        encodes=True,
        choices=("answer", "prompt"),
    )

    @property
    def is_rewarded(self) -> bool:
        """Whether rows are prompts, to which the model samples answers for rewards."""
        return is_rewarded(self.objective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(RowObjectiveConfig):
    """Options of the loss that a step minimises, for answers or for preferences."""

    beta: float | None = TRAINING.option(
        None,
        "Beta of a preference objective; default: 0.1, or 2.0 for simpo.",
        RESULT,
        above=0,
        at_most=1e6,
    )
    dpo_loss: str = TRAINING.option("sigmoid", "Loss of dpo.", RESULT, choices=_DPO_LOSSES)
    label_smoothing: float = TRAINING.option(
        0.0,
        "Assumed fraction of pairs with swapped answers, for cpo, simpo, and dpo with "
        f"{', '.join(_SMOOTHED_LOSSES)}.",
        RESULT,
        at_least=0,
        below=0.5,
    )
    sft_weight: float = TRAINING.option(
        0.0, "Weight in dpo of the mean loss of the chosen answers.", RESULT, at_least=0
    )
    cpo_alpha: float | None = TRAINING.option(
        None,
        "Weight in cpo and simpo of the mean loss of the chosen answers; default: 1 for cpo, 0 for "
        "simpo.",
        RESULT,
        at_least=0,
    )
    gamma: float = TRAINING.option(
        1.0, "Margin by which simpo prefers the chosen answer.", RESULT, at_least=0
    )
    desirable_weight: float = TRAINING.option(
        1.0, "Weight of answers labelled true, for kto.", RESULT, at_least=0
    )
    undesirable_weight: float = TRAINING.option(
        1.0, "Weight of answers labelled false, for kto.", RESULT, at_least=0
    )
    kto_loss: str = TRAINING.option(
        "kto", "Loss of kto.", RESULT, choices=("kto", "apo_zero_unpaired")
    )

    @property
    def effective_beta(self) -> float:
        """The value of `beta`, or its default."""
        default = _SIMPO_BETA if self.objective == "simpo" else _BETA
        return default if self.beta is None else self.beta

    @property
    def chosen_weight(self) -> float:
        """The weight of the mean loss of the chosen answers."""
        default = {"dpo": self.sft_weight, "orpo": 1.0, "cpo": 1.0}.get(self.objective, 0.0)
        return default if self.cpo_alpha is None else self.cpo_alpha

    def contradictions(self) -> Iterator[str]:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, objectives in _OBJECTIVES_OF_OPTION.items():
            if getattr(self, name) != defaults[name] and self.objective not in objectives:
                yield (
                    f"{flag(name)} goes with --objective {' or '.join(objectives)}: leave it out"
                )
        if self.beta is not None and self.objective in ("sft", *REWARD_OBJECTIVES):
            remedy = "use --kl" if self.is_rewarded else "leave it out"
            yield f"--beta goes with a preference objective: {remedy}"
        if (
            self.objective == "dpo"
            and self.label_smoothing
            and self.dpo_loss not in _SMOOTHED_LOSSES
        ):
            losses = ", ".join(_SMOOTHED_LOSSES)
            yield f"--label-smoothing goes with --dpo-loss {losses}: leave it out"
        if self.objective == "dpo" and self.dpo_loss == "exo_pair" and not self.label_smoothing:
            yield "--dpo-loss exo_pair needs --label-smoothing above 0, such as 0.001"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(CheckedConfig):
    """The options of the loss of sampled answers; the losses have TRL's names."""

    grpo_loss: str = TRAINING.option(
        "dapo",
        "Loss of grpo: the mean over all tokens of a step (dapo), over the answers' means (grpo), "
        "over --max-new-tokens for each answer (dr_grpo), or with one ratio per answer (gspo).",
        RESULT,
        choices=("dapo", "grpo", "dr_grpo", "gspo"),
    )
    clip_low: float = TRAINING.option(
        0.2,
        "Clip the ratio of an answer's probabilities to at least 1 minus this, for grpo.",
        RESULT,
        at_least=0,
        at_most=1,
    )
    clip_high: float = TRAINING.option(
        0.2,
        "Clip the ratio of an answer's probabilities to at most 1 plus this, for grpo.",
        RESULT,
        at_least=0,
        at_most=1e6,
    )
    kl: float = TRAINING.option(
        0.0,
        "Weight in grpo of the divergence from the model before its first step.",
        RESULT,
        at_least=0,
        at_most=1e6,
    )
    updates: int = TRAINING.option(
        1, "Optimizer steps on the same sampled answers, for grpo.", RESULT, at_least=1
    )
    scale_rewards: str = TRAINING.option(
        "group",
        "Divide the advantages of grpo by the standard deviation of the rewards of one prompt "
        "(group) or of a step (batch).",
        RESULT,
        choices=("group", "batch", "none"),
    )
    correct: bool = TRAINING.option(
        False,
        "Weight tokens by their probability in training over that in sampling, at most 3.",
        RESULT,
    )
    mask_truncated: bool = TRAINING.option(
        False, "Leave out answers of grpo that --max-new-tokens cut.", RESULT
    )
    max_new_tokens: int = TRAINING.option(
        256,
        "Maximum length in tokens of an answer that grpo samples.",
        RESULT,
        at_least=1,
        at_most=10**9,
    )
    temperature: float = TRAINING.option(
        1.0,
        "Temperature at which grpo samples answers and computes their probabilities.",
        RESULT,
        above=0,
        at_most=100,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(ObjectiveConfig, PolicyConfig):
    """The options of a step's loss under any objective."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardedConfig(PolicyConfig):
    """The rewards of grpo, and how answers are sampled."""

    reward: tuple[str, ...] = TRAINING.option(
        (),
        f"Reward of grpo: {REWARD_NAMES}; may be repeated.",
        INPUT,
        several=True,
        metavar="REWARD",
    )
    reward_timeout: float = TRAINING.option(
        10.0,
        "Seconds that a reward function or a schema may take for an answer.",
        RESULT,
        above=0,
        at_most=1e6,
    )
    group_size: int = TRAINING.option(
        8, "Answers that grpo samples for each row.", RESULT, at_least=2, at_most=10**4
    )
    top_p: float = TRAINING.option(
        1.0,
        "Let grpo sample from the likeliest tokens with this total probability.",
        RESULT,
        above=0,
        at_most=1,
    )
