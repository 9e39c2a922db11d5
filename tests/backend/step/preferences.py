"""Preference objectives, and steps for the tiny models."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxtune.config import ObjectiveConfig
from mlxtune.core.data.conversation import (
    CHOSEN,
    DESIRABLE,
    MISMATCHED,
    REJECTED,
    UNDESIRABLE,
    WHOLE,
)
from mlxtune.core.data.encode import Example
from mlxtune.core.objectives.objective import Objective
from tests.models import VOCAB_SIZE

_ROLES = {
    "pair": (CHOSEN, REJECTED),
    "whole": (CHOSEN, REJECTED, WHOLE),
    "desirable": (DESIRABLE, MISMATCHED),
    "undesirable": (UNDESIRABLE, MISMATCHED),
}


def objective_of(name: str, **options: Any) -> Objective:
    return Objective(ObjectiveConfig(objective=name, **options))


def rows_of(objective: Objective, rows: int = 4) -> list[Example]:
    """Return the examples of a step; the examples of a row share a prompt."""
    rng, examples = np.random.default_rng(5), []
    for row in range(1, rows + 1):
        prompt = rng.integers(0, VOCAB_SIZE, 6 + 3 * row)
        kinds = ("pair", "whole") if objective.has_pairs else ("desirable", "undesirable")
        which = objective.options.orpo_nll == "prompt" if objective.has_pairs else row % 2 == 0
        chosen = rng.integers(0, VOCAB_SIZE, 4 + row)
        for role in _ROLES[kinds[which]]:
            if role == MISMATCHED and not objective.needs_kl:
                continue
            answer = (
                rng.integers(0, VOCAB_SIZE, 3 + row) if role in (REJECTED, MISMATCHED) else chosen
            )
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            mask = np.zeros(len(tokens), dtype=np.uint8)
            mask[1 if role == WHOLE else len(prompt) :] = 1
            reference = -3.0 * len(answer) + rng.normal() if objective.needs_reference else 0.0
            examples.append(Example(row, tokens, mask, role=role, reference=reference))
    return examples
