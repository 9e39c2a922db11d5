"""Options of LoRA, and how its ranks, scale and initialisation follow from them."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from mlxtune.config.fields import CheckedConfig
from mlxtune.config.option import INPUT, LORA, RESULT, TRAINING
from mlxtune.errors import ConfigError

_NITER = re.compile(r"pissa_niter_([1-9][0-9]{0,2})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraShapeConfig(CheckedConfig):
    """Which projections get LoRA, and its rank and alpha."""

    rank: int = LORA.option(8, "Rank of the LoRA matrices.", RESULT, at_least=1, at_most=10**6)
    alpha: float = LORA.option(
        16.0, "LoRA alpha; the update is scaled by alpha / rank.", RESULT, above=0, at_most=1e6
    )
    targets: tuple[str, ...] = LORA.option(
        ("q_proj", "v_proj"),
        "Projections that get LoRA, by name (q_proj) or path (self_attn.q_proj), or 'all'.",
        RESULT,
        metavar="NAME,NAME",
    )
    num_layers: int | None = LORA.option(
        None, "Apply LoRA to the last N layers only; default: all.", RESULT, at_least=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedConfig):
    """How the LoRA matrices start and learn."""

    dropout: float = LORA.option(
        0.0, "Dropout on the input of the LoRA matrices.", RESULT, at_least=0, below=1
    )
    target_rank: tuple[str, ...] = LORA.option(
        (),
        "Rank of one target instead of --rank, such as q_proj=16; may be repeated.",
        RESULT,
        several=True,
        metavar="NAME=N",
    )
    rslora: bool = LORA.option(
        False, "Scale the update by alpha / √rank (rsLoRA): for high ranks.", RESULT
    )
    dora: bool = LORA.option(False, "Also train the magnitude of each weight row (DoRA).", RESULT)
    init: str = LORA.option(
        "lora",
        "Initial LoRA values: lora is random, pissa takes the weights' largest singular vectors, "
        "pissa_niter_N approximates these in N iterations, which is faster.",
        RESULT,
        metavar="lora|pissa|pissa_niter_N",
    )
    init_adapter: str | None = LORA.option(
        None,
        "Continue training an adapter (file or folder), with its rank, alpha and targets.",
        INPUT,
        path=True,
    )
    lr_ratio: float = TRAINING.option(
        1.0, "Learning rate of B, as a multiple of A's (LoRA+).", RESULT, above=0, at_most=1e6
    )
    weight_decay: float = TRAINING.option(0.01, "AdamW weight decay.", RESULT, at_least=0)

    @cached_property
    def target_ranks(self) -> Mapping[str, int]:
        """The ranks of `target_rank` by target, in their order. Raises ConfigError."""
        return target_ranks(self.target_rank)

    @property
    def is_pissa(self) -> bool:
        """Whether the matrices start from the weights' singular vectors (PiSSA)."""
        return self.init == "pissa" or pissa_iterations(self.init) is not None

    def contradictions(self) -> Iterator[str]:
        try:
            _ = self.target_ranks
        except ConfigError as error:
            yield from error.problems
        if problem := init_problem(self.init):
            yield problem
            return
        if self.is_pissa and self.dora:
            yield (
                f"--init {self.init} changes the weights whose row norms --dora trains: "
                "leave one of them out"
            )
        if self.is_pissa and self.init_adapter is not None:
            yield (
                f"--init {self.init} starts from the weights, --init-adapter from an adapter: "
                "leave one of them out"
            )


def target_ranks(options: Iterable[str]) -> dict[str, int]:
    """Parse options such as `q_proj=16` into ranks by target, in their order.

    Raises ConfigError, which lists every problem.
    """
    ranks: dict[str, int] = {}
    problems = []
    for option in options:
        target, _, text = (part.strip() for part in option.rpartition("="))
        if target and re.fullmatch("[1-9][0-9]{6,}", text):
            problems.append(f"--target-rank {option!r:.60}: the rank must be at most 999999")
        elif not target or not re.fullmatch("[0-9]{1,6}", text) or int(text) < 1:
            problems.append(f"--target-rank {option!r:.60} must be like q_proj=16")
        elif target in ranks:
            problems.append(f"--target-rank names {target:.60} twice")
        else:
            ranks[target] = int(text)
    if problems:
        raise ConfigError(problems)
    return ranks


def pattern_of(name: str, ranks: Mapping[str, int]) -> str | None:
    """Return the first target that matches a module's full name, or None.

    A target matches the last parts of a name: `q_proj`, `self_attn.q_proj`,
    `layers.3.self_attn.q_proj`. PEFT's `rank_pattern` matches the same way.
    """
    return next((target for target in ranks if f".{name}".endswith(f".{target}")), None)


def scale_of(alpha: float, rank: int, *, rslora: bool) -> float:
    """Return the factor of the low-rank product: alpha / rank.

    With rsLoRA it is alpha / √rank (arXiv:2312.03732, section 3), which keeps the size of the
    update independent of the rank.
    """
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def alpha_of(scale: float, rank: int, *, rslora: bool) -> float:
    """Return the alpha that gives a scale, exactly if possible."""
    alpha = scale * (math.sqrt(rank) if rslora else rank)
    near = (alpha, math.nextafter(alpha, 0), math.nextafter(alpha, math.inf))
    return next((each for each in near if scale_of(each, rank, rslora=rslora) == scale), alpha)


def pissa_iterations(init: str) -> int | None:
    match = _NITER.fullmatch(init)
    return int(match[1]) if match else None


def init_problem(init: str) -> str | None:
    if init in ("lora", "pissa") or pissa_iterations(init):
        return None
    return f"--init must be lora, pissa or pissa_niter_N with N from 1 to 999, not {init!r:.60}"
