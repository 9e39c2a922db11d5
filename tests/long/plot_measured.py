"""The charts docs/bench.png and docs/step.png, drawn from docs/measured by `measured_pages`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from tests.long.bench_table import CASES
from tests.long.measured import SIDES, Card, read_cards
from tests.paths import DOCS

OURS, INK = "#0f766e", "#24292f"
COLORS = {"mlxtune": OURS, "mlx-lm": "#c7c9cc", "PEFT": "#8e949b"}
_BAR = 0.27  # the height of a bar, where a case is 1 high


@dataclass(frozen=True)
class Bars:
    """A case: tokens per second and peak GB of each side that was measured."""

    title: str
    sides: dict[str, tuple[float, float]]


def measured(name: str) -> Any:
    """Return the JSON of a measured case or step."""
    return json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8"))


def card_bars(card: Card) -> list[Bars]:
    """Return a card's cases that have a peer."""
    found = []
    for case in card.cases:
        sides = [side for side in SIDES if side == "mlxtune" or case.comparable(side)]
        values = {side: (case.tokens_per_s(side), case.peak_gb(side)) for side in sides}
        if len(values) > 1:
            found.append(Bars(case.title, values))
    return found


def cpu_bars() -> list[Bars]:
    """Return the CPU's cases beside mlx-lm."""
    found = []
    for name, case in CASES.items():
        if case.execution != "auto" or not (DOCS / "measured" / f"{name}.json").exists():
            continue
        result = measured(name)
        both = {"mlxtune": result["ours"], "mlx-lm": result["theirs"]}
        values = {
            side: (one["real_tokens_per_s"]["median"], one["peak_memory"]["median"] / 1e9)
            for side, one in both.items()
        }
        found.append(Bars(case.title, values))
    return found


def draw_bench() -> None:
    """Draw tokens per second and peak memory of all sides, under a heading for each machine."""
    groups = {f"On an {card.device}, bfloat16": card_bars(card) for card in read_cards()}
    groups = {title: bars for title, bars in groups.items() if bars}
    groups["On two CPU cores, float32"] = cpu_bars()
    heights = [_height(bars) + 1.1 for bars in groups.values()]
    figure, rows = plt.subplots(
        *(len(groups), 2),
        figsize=(9.6, 0.62 * sum(heights) + 0.4),
        height_ratios=heights,
        squeeze=False,
    )
    for axes, (title, bars) in zip(rows, groups.items(), strict=True):
        _draw_group(axes, bars)
        axes[0].annotate(
            title,
            (0.01, 1),
            (0, 26),
            xycoords=("figure fraction", "axes fraction"),
            textcoords="offset points",
            size=12,
            weight="bold",
        )
    handles = [mpl.patches.Patch(color=color) for color in COLORS.values()]
    figure.legend(handles, SIDES.values(), loc="upper right", ncols=3, frameon=False)
    figure.tight_layout(h_pad=2.2)
    figure.savefig(DOCS / "bench.png", dpi=130)


def _height(bars: Iterable[Bars]) -> float:
    return sum(_case_height(case) for case in bars)


def _case_height(case: Bars) -> float:
    return _BAR * len(case.sides) + 0.35


def _draw_group(axes: Sequence[Any], bars: Sequence[Bars]) -> None:
    """Draw a machine's cases on a pair of axes: tokens per second, and peak memory."""
    panels = (
        ("tokens per second, and mlxtune's as a multiple", "×{:.1f}"),
        ("peak memory in GB, and mlxtune's share of it", "{:.0%}"),
    )
    for quantity, (axis, (title, ratio_text)) in enumerate(zip(axes, panels, strict=True)):
        top, ticks = 0.0, []
        for case in bars:
            ours = case.sides["mlxtune"][quantity]
            for line, (side, values) in enumerate(case.sides.items()):
                value, place = values[quantity], top + _BAR * (line + 0.5)
                axis.barh(place, value, 0.9 * _BAR, color=COLORS[side])
                label = _label(value)
                axis.text(value, place, f" {label}", va="center", size=8)
                if side != "mlxtune":
                    axis.annotate(
                        ratio_text.format(ours / value),
                        (value, place),
                        (10 + 5.5 * len(label), 0),
                        textcoords="offset points",
                        va="center",
                        size=9,
                        weight="bold",
                        color=OURS,
                    )
            ticks.append(top + _BAR * len(case.sides) / 2)
            top += _case_height(case)
        axis.set_title(title, loc="left", size=10)
        axis.set_ylim(top, -0.15)
        axis.margins(x=0.3)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
        axis.set_yticks(ticks, [fill(case.title, 26) for case in bars] if quantity == 0 else [])


def _label(value: float) -> str:
    """Return a number with three digits, or all that stand before the point."""
    return f"{value:,.{2 if value < 1 else 1 if value < 100 else 0}f}"


def draw_step() -> None:
    """Draw each part's share of a step's time on the CPU."""
    found = measured("step")
    total = sum(found["seconds"].values())
    parts = list(found["seconds"].items())
    figure, axis = plt.subplots(figsize=(8, 0.36 * len(parts) + 0.7))
    matmuls = {"projections", "head", "attention", "LoRA"}
    for place, (name, seconds) in enumerate(parts):
        axis.barh(place, seconds / total, color=OURS if name in matmuls else COLORS["mlx-lm"])
        share = f" {seconds / total:.1%}  {1e3 * seconds / found['tokens']:.2f} ms a token"
        axis.text(seconds / total, place, share, va="center", size=8)
    axis.set_yticks(range(len(parts)), [name for name, _ in parts], size=9)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(left=False, bottom=False, labelbottom=False)
    axis.set_title("where the time of a step goes", loc="left", size=10)
    figure.tight_layout()
    figure.savefig(DOCS / "step.png", dpi=130)


def draw_all() -> None:
    """Draw all charts."""
    mpl.use("Agg")
    mpl.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK})
    draw_bench()
    draw_step()
