"""Draw docs/bench.png and docs/step.png from docs/measured, and their `-gpu` variants if measured.

pip install matplotlib && python -m tests.long.plot_measured
"""

from __future__ import annotations

import json
from textwrap import fill
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from tests.long.bench_table import CASES
from tests.paths import DOCS

PICTURES = {"auto": "bench.png", "gpu": "bench-gpu.png"}
OURS, THEIRS, INK = "#0f766e", "#c7c9cc", "#24292f"


def measured(name: str) -> Any:
    """Return the JSON of a measured case or step."""
    return json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8"))


def draw_bench(execution: str) -> None:
    """Draw tokens/s and peak memory of both sides for each measured case."""
    every = [name for name, case in CASES.items() if case.execution == execution]
    cases = [name for name in every if (DOCS / "measured" / f"{name}.json").exists()]
    if not cases:
        return
    found = [measured(name) for name in cases]
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 0.62 * len(cases) + 1.2), sharey=True)
    panels = (
        ("tokens a second", "real_tokens_per_s", 1.0, "{:.0f}", "×{:.1f}"),
        ("peak memory, GB", "peak_memory", 1e9, "{:.2f}", "{:.0%}"),
    )
    for axis, (title, key, unit, as_text, ratio_text) in zip(axes, panels, strict=True):
        for place, each in enumerate(found):
            pair = [each[side][key]["median"] / unit for side in ("theirs", "ours")]
            for value, offset, colour in zip(pair, (0.2, -0.2), (THEIRS, OURS), strict=True):
                axis.barh(place + offset, value, 0.38, color=colour)
                axis.text(value, place + offset, " " + as_text.format(value), va="center", size=8)
            axis.annotate(
                ratio_text.format(each["ratio"][key]),
                (pair[1], place - 0.2),
                (8 + 7 * len(as_text.format(pair[1])), 0),
                textcoords="offset points",
                va="center",
                weight="bold",
                color=OURS,
            )
        axis.set_title(title, loc="left", size=10)
        axis.margins(x=0.28)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
    axes[0].set_yticks(range(len(cases)), [fill(CASES[name].title, 26) for name in cases], size=9)
    axes[0].invert_yaxis()
    handles = [mpl.patches.Patch(color=colour) for colour in (THEIRS, OURS)]
    figure.legend(handles, ["mlx-lm", "mlxtune"], loc="upper right", ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(DOCS / PICTURES[execution], dpi=130)


def draw_step(name: str) -> None:
    """Draw each part's share of a step's time, if it was measured."""
    if not (DOCS / "measured" / f"{name}.json").exists():
        return
    found = measured(name)
    total = sum(found["seconds"].values())
    parts = list(found["seconds"].items())
    figure, axis = plt.subplots(figsize=(8, 0.36 * len(parts) + 0.7))
    products = {"projections", "head", "attention", "LoRA"}
    for place, (name, seconds) in enumerate(parts):
        axis.barh(place, seconds / total, color=OURS if name in products else THEIRS)
        share = f" {seconds / total:.1%}  {1e3 * seconds / found['tokens']:.2f} ms a token"
        axis.text(seconds / total, place, share, va="center", size=8)
    axis.set_yticks(range(len(parts)), [name for name, _ in parts], size=9)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(left=False, bottom=False, labelbottom=False)
    axis.set_title("where the time of a step goes", loc="left", size=10)
    figure.tight_layout()
    figure.savefig(DOCS / f"{name}.png", dpi=130)


if __name__ == "__main__":
    mpl.use("Agg")
    mpl.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK})
    for execution in PICTURES:
        draw_bench(execution)
    for name in ("step", "step-gpu"):
        draw_step(name)
