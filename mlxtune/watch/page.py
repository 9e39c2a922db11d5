"""The live page: its frame, and the parts that the server sends whenever they change."""

import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from mlxtune.core.run.run import Run, number, text
from mlxtune.core.run.summary import RunView, validated_alike
from mlxtune.core.text import count, duration
from mlxtune.views.pages.charts import Chart, draw_all
from mlxtune.views.pages.page import PageType
from mlxtune.views.pages.run_charts import charts_of, comparison_charts, style_of
from mlxtune.views.pages.run_page import comparison_headline, evaluation_context
from mlxtune.views.parts import run_figures
from mlxtune.watch.asking import LONGEST_QUESTION, Question

PAGE = PageType(
    command="watch",
    styles=("chart.css", "run_page.css", "watch.css"),
    scripts=("chart.js", "watch.js"),
    package=__package__,
    connects="'self'",
)
# The markup of each part by its name, empty for a hidden part; `chart_data` contains the values of
# the charts, `can_ask` is a boolean, and `title` is the page's title.
Parts = dict[str, Any]
_PARTS = ("problem", "back", "head", "charts", "why_not", "latest", "samples", "data")
# The time left is estimated from this many recent steps.
_RECENT_STEPS = 50


def render_page(folder: Path) -> str:
    """Return the frame of the page, without its parts."""
    return PAGE.render("watch.html", folder=str(folder), longest_question=LONGEST_QUESTION)


def render_run(key: str, run: Run, why_not: str, *, several: bool, stopping: bool) -> Parts:
    """Return the page's parts for one run; `why_not` says why its model answers no questions."""
    view = RunView.of(run)
    state = run_state(key, run, view, stopping=stopping)
    return _parts(
        title=f"{state['share']} · {view.name}" if state["share"] else view.name,
        back="several" if several else "",
        head=_fragment("run_head.html", view=view, **state),
        **_charts(charts_of(run, view)),
        can_ask=not why_not,
        why_not=why_not if view.finished else "",
        # The final evaluation has newer answers for the same rows.
        latest=_fragment("latest.html", latest=run.samples)
        if run.samples and not run.evaluation
        else "",
        samples=_fragment("evaluation.html", **evaluation_context(run, view))
        if run.evaluation
        else "",
        data=_fragment("ledgers.html", ledgers=[ledger.as_dict() for ledger in run.ledgers]),
    )


def render_runs(runs: Mapping[str, Run], stopping: Set[str]) -> Parts:
    """Return the page's parts for several runs, shown side by side."""
    views = [RunView.of(run) for run in runs.values()]
    rows = [
        {
            "view": view,
            "style": style_of(place),
            **run_state(key, run, view, stopping=key in stopping),
        }
        for place, ((key, run), view) in enumerate(zip(runs.items(), views, strict=True))
    ]
    title = count(len(runs), "run")
    listed = list(runs.values())
    sentence = comparison_headline(views, validated_alike(listed))
    head = _fragment("runs_head.html", rows=rows, sentence=sentence)
    return _parts(title=title, head=head, **_charts(comparison_charts(listed, views)))


def run_state(key: str, run: Run, view: RunView, *, stopping: bool) -> dict[str, Any]:
    """Return a run's state, such as the share done and the time left, as values for a template."""
    total, running = view.total_steps, view.status == "running"
    left = seconds_left(run, view) if running else None
    limit = number(run.about, "plan", "memory", "limit")
    return {
        "key": key,
        "share": f"{100 * view.step / total:.0f}%" if running and total else "",
        "left": "" if left is None else f"about {duration(left)} left",
        "limit": limit,
        "figures": run_figures(view, limit),
        "running": running,
        "stopping": stopping,
        "model": text(run.config, "model_path"),
    }


def seconds_left(run: Run, view: RunView) -> float | None:
    """Return the expected time of the remaining steps; None before the first step is measured."""
    seconds = [each for each in run.column("seconds")[-_RECENT_STEPS:] if math.isfinite(each)]
    if view.total_steps is None or not seconds:
        return None
    return max(view.total_steps - view.step, 0) * math.fsum(seconds) / len(seconds)


def render_answers(question: Question | None) -> str:
    """Return the markup of a question and its answers so far."""
    if question is None:
        return ""
    return _fragment("answers.html", question=question)


def _parts(**parts: Any) -> Parts:
    return dict.fromkeys(_PARTS, "") | {"can_ask": False, **parts}


def _fragment(template: str, **context: Any) -> str:
    return str(PAGE.fragment(template, **context))


def _charts(charts: list[Chart]) -> dict[str, Any]:
    drawn = draw_all(charts)
    return {"charts": _fragment("charts.html", **drawn), "chart_data": drawn["chart_data"]}
