"""Reads the rank, scale and initialisation of LoRA from the options."""

import math
import re
from collections.abc import Iterable, Mapping

from mlxtune.errors import ConfigError

_NITER = re.compile(r"pissa_niter_([1-9][0-9]{0,2})")


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
            problems.append(f"--target-rank {option!r:.60}: must be like q_proj=16")
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
