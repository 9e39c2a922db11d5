"""What LoRA's options may not be together."""

from __future__ import annotations

from typing import Protocol

from mlxtune.config.ranks import init_problem, target_ranks
from mlxtune.errors import ConfigError


class _LoRAOptions(Protocol):
    @property
    def target_rank(self) -> tuple[str, ...]: ...
    @property
    def dora(self) -> bool: ...
    @property
    def init(self) -> str: ...
    @property
    def init_adapter(self) -> str | None: ...


def lora_problems(config: _LoRAOptions) -> list[str]:
    """Return what is wrong with a config's LoRA options, each with its remedy."""
    problems = []
    try:
        target_ranks(config.target_rank)
    except ConfigError as error:
        problems += error.problems
    if problem := init_problem(config.init):
        return [*problems, problem]
    if config.init != "lora" and config.dora:
        problems.append(
            f"--init {config.init} takes rows out of the weights that --dora takes the sizes of: "
            "leave one of them out"
        )
    if config.init != "lora" and config.init_adapter is not None:
        problems.append(
            f"--init {config.init} begins from the weights, --init-adapter from an adapter: "
            "leave one of them out"
        )
    return problems
