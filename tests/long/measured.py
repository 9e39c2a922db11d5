"""The files in docs/measured that `tests.long.gpu` writes, one for each card.

    schema_version   1
    device, driver, cuda, cores, device_info, versions
                     the machine and its software; null if unknown
    date, commit     when, and with which commit of this repository
    cases            by name: `title`, `dtype`, `batch_size` in rows, `steps`, `tokens` and
                     `supervised_tokens` of all steps, and `sides`
    settings         a list: `variables`, the environment of the process; `steps`; and `cases`, the
                     results of mlxtune by case
    kernels          by case: mlxtune's result with `kernel_s_per_step`, `launches_per_step` and
                     the `kernels` that take longest
    parts            what else `tests.long.gpu` reports

`sides` has a result for `mlxtune`, `mlx-lm` and `PEFT` (transformers and PEFT); a side without one
was not tried. A result is `{"failed": why}`, `{"skipped": why}`, or

    seconds          of each pass over all steps, after a warm-up that takes them all
    peak_memory      in bytes, as the side's library counts it
    warm_up_s, losses, tokens_per_s, loss_difference, losses_agree, needed_flops,
    share_of_measured_peak
                     where measured: the warm-up's seconds, the losses of the first pass, and what
                     follows from these

Later versions of the schema may add fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.paths import DOCS

SCHEMA_VERSION = 1
FOLDER = DOCS / "measured"
# The sides, in the order of the tables, and their titles there.
SIDES = {"mlxtune": "mlxtune", "mlx-lm": "mlx-lm", "PEFT": "transformers + PEFT"}


@dataclass(frozen=True)
class CardCase:
    """A case on a card, with the results of the sides that were measured, and why others lack."""

    title: str
    steps: int
    tokens: int
    results: Mapping[str, Mapping[str, Any]]

    def measured(self, side: str) -> bool:
        """Return whether a side has figures."""
        return "seconds" in self.results.get(side, {})

    def seconds(self, side: str) -> float:
        """Return the seconds of a step, the mean of the faster pass."""
        return float(min(self.results[side]["seconds"]) / self.steps)

    def tokens_per_s(self, side: str) -> float:
        """Return the tokens of the examples that a side takes in a second."""
        return self.tokens / self.steps / self.seconds(side)

    def peak_gb(self, side: str) -> float:
        """Return a side's peak memory."""
        return float(self.results[side]["peak_memory"] / 1e9)

    def missing(self, side: str) -> str:
        """Return in a few words why a side has no figures; empty if it was not tried."""
        found = self.results.get(side, {})
        if "failed" in found:
            return "failed"
        # Such as "stopped after 60 s, in the warm-up".
        return str(found.get("skipped", "")).split(",")[0]

    def comparable(self, peer: str) -> bool:
        """Return whether a peer has figures, for the same losses as far as they were compared."""
        return self.measured(peer) and self.results[peer].get("losses_agree") is not False


@dataclass(frozen=True)
class Card:
    """What was measured on one card."""

    name: str
    device: str
    report: Mapping[str, Any]

    @property
    def cases(self) -> list[CardCase]:
        """The cases that mlxtune has figures for."""
        found = [
            CardCase(case["title"], case["steps"], case["tokens"], case["sides"])
            for case in self.report["cases"].values()
        ]
        return [case for case in found if case.measured("mlxtune")]


def read_card(path: Path) -> Card | None:
    """Return the card of a file; None for the CPU's files, which have another schema."""
    report = json.loads(path.read_text(encoding="utf-8"))
    if "cases" not in report or report.get("tiny"):
        return None
    if report["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"{path.name} has schema version {report['schema_version']}")
    return Card(path.stem, report["device"], report)


def read_cards(folder: Path = FOLDER) -> list[Card]:
    """Return the cards that were measured, the last one first."""
    found = [card for path in folder.glob("*.json") if (card := read_card(path))]
    return sorted(found, key=lambda card: (card.report["date"], card.name), reverse=True)
