"""The loss that a step minimises, as a function of the log-probabilities of the step's examples.

A pair has examples of a chosen and of a rejected answer; a labelled row has examples of one answer.
The log-probability of an answer is the sum over its supervised tokens, in nats. No function here
depends on how a step is split into micro-batches or over workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.config.fields import CheckedConfig
from mlxtune.config.objective_config import LABEL_OBJECTIVES, PAIR_OBJECTIVES, ObjectiveConfig
from mlxtune.core.data.conversation import (
    CHOSEN,
    DESIRABLE,
    MISMATCHED,
    REJECTED,
    UNDESIRABLE,
    WHOLE,
)
from mlxtune.core.data.encode import Example, predicted_tokens
from mlxtune.core.objectives.losses import (
    CROSS_ROW_LOSSES,
    DPO_LOSSES,
    KTO_LOSSES,
    OTHER_LOSSES,
    AnswerLogps,
    Loss,
    log_odds_ratio,
)

_Floats = npt.NDArray[np.float64]
# The index of each role's column in arrays (columns, R) of a step's log-probabilities.
_COLUMN_OF_ROLE = {CHOSEN: 0, DESIRABLE: 0, UNDESIRABLE: 0, REJECTED: 1, WHOLE: 2, MISMATCHED: 3}
_COLUMNS = 4


@dataclass(frozen=True, eq=False)
class AnswerLayout:
    """How rows' answers are laid out in arrays (columns, R), and where each example's goes.

    `slots` is int64 (E,): the index of each example's answer in such an array, flattened; an answer
    of several turns has several examples. `references` and `counts` are (columns, R): each answer's
    reference log-probability, and its number of supervised tokens. `desirable` is (R,), 1 for a row
    whose label is true.
    """

    slots: npt.NDArray[np.int64]
    references: _Floats
    counts: _Floats
    desirable: _Floats

    @property
    def rows(self) -> int:
        return int(self.counts.shape[1])

    def sums(self, logps: _Floats) -> _Floats:
        """Sum the examples' log-probabilities (E,) for each answer; return (columns, R)."""
        sums = np.zeros(self.counts.size)
        np.add.at(sums, self.slots, logps)
        return sums.reshape(self.counts.shape)


@dataclass(frozen=True)
class StepTotals:
    """Totals over all rows of a step, on which the loss of any subset of the rows depends.

    `tokens` counts the tokens whose cross-entropy is added to the loss; `kl` is the divergence.
    """

    rows: int
    tokens: float
    kl: float = 0.0


@dataclass(frozen=True)
class Objective:
    """An objective with its options: computes the loss and the metrics of rows."""

    options: ObjectiveConfig

    @classmethod
    def of(cls, config: CheckedConfig) -> Objective:
        """Return the objective that the options of a command name."""
        return cls(config.part(ObjectiveConfig))

    @property
    def name(self) -> str:
        return self.options.objective

    @property
    def is_sft(self) -> bool:
        """Whether this is supervised fine-tuning, whose loss weights need no forward pass."""
        return self.name == "sft"

    # The loss needs the model's own probabilities, and no values of LoRA before the first step.
    temperature = 1.0
    needs_reference_lora = False

    @property
    def keeps_rows_whole(self) -> bool:
        """Whether the loss of a row needs all its examples together."""
        return not self.is_sft

    @property
    def needs_first_pass(self) -> bool:
        """Whether every step needs log-probabilities before its gradients."""
        return self.needs_kl or self.is_across_rows

    @property
    def has_pairs(self) -> bool:
        return self.name in PAIR_OBJECTIVES

    @property
    def needs_reference(self) -> bool:
        return self.name in ("dpo", *LABEL_OBJECTIVES)

    @property
    def needs_kl(self) -> bool:
        """Whether the loss needs a KL estimate, from prompts paired with other rows' answers."""
        return self.name in LABEL_OBJECTIVES and self.options.kto_loss == "kto"

    @property
    def is_across_rows(self) -> bool:
        """Whether the loss of a row depends on the other rows of its step."""
        return self.name == "dpo" and self.options.dpo_loss in CROSS_ROW_LOSSES

    @property
    def description(self) -> str:
        """The objective, its loss and its beta, as the plan and the model card show them."""
        options = self.options
        loss = {"dpo": options.dpo_loss, "kto": options.kto_loss}.get(self.name)
        named = f" ({loss})" if loss not in (None, "sigmoid", self.name) else ""
        return f"{self.name}{named}, beta {options.effective_beta:g}"

    @cached_property
    def _loss(self) -> Loss:
        options = self.options
        losses = {"dpo": DPO_LOSSES.get(options.dpo_loss), "kto": KTO_LOSSES[options.kto_loss]}
        return losses.get(self.name) or OTHER_LOSSES[self.name]

    @property
    def _nll_column(self) -> int:
        return _COLUMN_OF_ROLE[WHOLE if self.options.orpo_nll == "prompt" else CHOSEN]

    def lay_out(self, examples: Sequence[Example]) -> AnswerLayout:
        """Return the layout of the examples' rows, in the order of their first examples."""
        rows: dict[int, int] = {}
        index = [rows.setdefault(example.key, len(rows)) for example in examples]
        columns = np.array([_COLUMN_OF_ROLE[example.role] for example in examples], dtype=np.int64)
        slots = columns * len(rows) + np.array(index, dtype=np.int64)
        references, counts = np.zeros(_COLUMNS * len(rows)), np.zeros(_COLUMNS * len(rows))
        np.add.at(references, slots, [example.reference for example in examples])
        np.add.at(counts, slots, [predicted_tokens(example) for example in examples])
        desirable = np.zeros(len(rows))
        for example, row in zip(examples, index, strict=True):
            desirable[row] = example.role == DESIRABLE
        shape = _COLUMNS, len(rows)
        return AnswerLayout(slots, references.reshape(shape), counts.reshape(shape), desirable)

    def totals(self, layout: AnswerLayout, kl: float = 0.0) -> StepTotals:
        return StepTotals(layout.rows, float(layout.counts[self._nll_column].sum()), kl)

    def kl(self, layout: AnswerLayout, sums: Any) -> float:
        """Return the divergence, at least 0: the mean log-ratio of the mismatched answers.

        `sums` is (columns, R). The gradient does not flow through the result.
        """
        column = _COLUMN_OF_ROLE[MISMATCHED]
        there = layout.counts[column] > 0
        if not there.any():
            return 0.0
        return max(float((sums[column] - layout.references[column])[there].mean()), 0.0)

    def loss(self, sums: Any, layout: AnswerLayout, totals: StepTotals, xp: Any = np) -> Any:
        """Return the part of a step's loss that these rows contribute, a scalar.

        `sums` (columns, R) has the log-probabilities of the rows' answers, as an array of the
        module `xp`.
        """
        losses = self._loss(self._answer_logps(sums, layout, totals, xp), self.options, xp)
        loss = losses.sum() / totals.rows
        if weight := self.options.chosen_weight:
            loss = loss - (weight / totals.tokens) * sums[self._nll_column].sum()
        return loss

    def evaluate(
        self, examples: Sequence[Example], logps: _Floats
    ) -> tuple[float, dict[str, float]]:
        """Return the loss and metrics of rows from their examples' log-probabilities (E,)."""
        if self.is_sft:
            return -float(logps.sum()) / sum(map(predicted_tokens, examples)), {}
        mismatched = np.array([example.role == MISMATCHED for example in examples])
        rows = [example for example in examples if example.role != MISMATCHED]
        layout, kl = self.lay_out(rows), 0.0
        if mismatched.any():
            others = self.lay_out([each for each in examples if each.role == MISMATCHED])
            kl = self.kl(others, others.sums(logps[mismatched]))
        own = logps[~mismatched]
        loss = self.loss(layout.sums(own), layout, self.totals(layout, kl))
        return float(loss), self.metrics(own, layout, kl)

    def metrics(self, logps: _Floats, layout: AnswerLayout, kl: float = 0.0) -> dict[str, float]:
        """Return TRL's metrics of rows from their examples' log-probabilities (E,)."""
        sums = layout.sums(logps)
        logps_of = self._answer_logps(sums, layout, self.totals(layout, kl), np)
        if not self.has_pairs:
            return self._label_metrics(logps_of)
        chosen, rejected = logps_of.chosen, logps_of.rejected
        if self.name in ("orpo", "simpo"):
            chosen, rejected = chosen / logps_of.count_chosen, rejected / logps_of.count_rejected
        beta = self.options.effective_beta
        rewards = beta * (chosen - logps_of.reference_chosen)
        others = beta * (rejected - logps_of.reference_rejected)
        values = {
            "rewards/chosen": rewards.mean(),
            "rewards/rejected": others.mean(),
            "rewards/accuracies": (rewards > others).mean(),
            "rewards/margins": (rewards - others).mean(),
            "logps/chosen": chosen.mean(),
            "logps/rejected": rejected.mean(),
        }
        if self.options.chosen_weight:
            tokens = layout.counts[self._nll_column].sum()
            values["nll_loss"] = -sums[self._nll_column].sum() / tokens
        if self.name == "orpo":
            odds = log_odds_ratio(logps_of, np)
            values["log_odds_ratio"] = -np.logaddexp(0, -odds).mean()
            values["log_odds_chosen"] = odds.mean()
        return {name: float(value) for name, value in values.items()}

    def _label_metrics(self, logps_of: AnswerLogps) -> dict[str, float]:
        rewards = self.options.effective_beta * logps_of.chosen_ratio
        values = {"kl": logps_of.kl} if self.needs_kl else {}
        for name, rows in (
            ("chosen", logps_of.desirable == 1),
            ("rejected", logps_of.desirable == 0),
        ):
            if rows.any():
                values[f"rewards/{name}"] = rewards[rows].mean()
                values[f"logps/{name}"] = logps_of.chosen[rows].mean()
        if {"rewards/chosen", "rewards/rejected"} <= values.keys():
            values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
        return {name: float(value) for name, value in values.items()}

    def expected_first_loss(self, layout: AnswerLayout) -> float | None:
        """Return the loss before the first update, when the model equals its reference.

        Returns None without a reference.
        """
        if not self.needs_reference:
            return None
        return float(self.loss(layout.references, layout, self.totals(layout)))

    def _answer_logps(
        self, sums: Any, layout: AnswerLayout, totals: StepTotals, xp: Any
    ) -> AnswerLogps:
        # Zeros replace a missing second answer or reference; no loss reads them.
        counts = np.maximum(layout.counts, 1)
        references, labels = layout.references, layout.desirable
        arrays: list[Any] = [references[0], references[1], counts[0], counts[1], labels]
        if xp is not np:
            arrays = [xp.array(array.astype(np.float32)) for array in arrays]
        return AnswerLogps(*(sums[0], sums[1], *arrays, totals.kl))


SFT = Objective(ObjectiveConfig())


def with_references(examples: Sequence[Example], references: Sequence[float]) -> list[Example]:
    """Return copies of examples, with their reference log-probabilities set."""
    return [
        replace(example, reference=float(reference))
        for example, reference in zip(examples, references, strict=True)
    ]
