"""Shows one or several runs on an HTML page that needs no network, and in a notebook's card."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from markupsafe import Markup

from mlxtune.core.evaluation.outcome import Evaluation, RewardChange
from mlxtune.core.files.writing import write_file
from mlxtune.core.formatting import join_few, loss_text, minute_of, pluralize, signed_loss
from mlxtune.core.run.run_folder import REPORT
from mlxtune.core.run.stored_run import Run, get_mapping, get_str, number, read_run
from mlxtune.core.run.summary import (
    LOSS_MEASURE,
    REWARD_MEASURE,
    RunView,
    Verdict,
    differing_options,
    measure_of,
    measured_plan_values,
    option_text,
    option_texts,
    predicted_fractions,
    validated_alike,
)
from mlxtune.views.pages.charts import Chart, draw, draw_all
from mlxtune.views.pages.page import PageType, asset, render
from mlxtune.views.pages.reward_section import reward_context
from mlxtune.views.pages.run_charts import charts_of, comparison_charts, main_chart, style_of
from mlxtune.views.parts import run_figures, verdict_line

PAGE = PageType(
    command="report",
    styles=("chart.css", "run_page.css"),
    scripts=("chart.js", "run_page.js"),
)
# The maximum numbers of skipped steps on a page, of rows of a skipped step, and of epochs.
_MAX_SKIPPED, _MAX_ROWS, _MAX_EPOCHS = 100, 8, 200


_INCOMPARABLE = Verdict(
    "uncertain",
    "The runs were not validated on the same rows: compare the shapes of their validation losses, "
    "not the numbers.",
)
_OTHER_REWARDS = Verdict(
    "uncertain",
    "The runs were not validated on the same rows with the same rewards: compare the shapes of "
    "their curves, not the numbers.",
)


def write_page(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Write a run's page into its folder; return the page's path, or warn and return None."""
    target = folder / REPORT
    try:
        write_file(target, [render_runs([read_run(folder)]).encode()])
    # The adapter is already written, so an error in the page must not fail the run.
    except Exception as problem:  # noqa: BLE001
        warn(f"{target}: the report could not be written: {type(problem).__name__}: {problem}")
        return None
    return target


def render_runs(runs: Sequence[Run]) -> str:
    views = [RunView.of(run) for run in runs]
    problems = [
        f"{view.name}: {problem}" if len(runs) > 1 else problem
        for view in views
        for problem in view.problems
    ]
    if len(runs) == 1:
        context = _run_context(runs[0], views[0])
        return PAGE.render("run_page.html", problems=problems, **context)
    context = _comparison_context(runs, views)
    return PAGE.render("comparison_page.html", problems=problems, **context)


def _chart_context(charts: Sequence[Chart]) -> dict[str, Any]:
    context = draw_all(charts)
    data = json.dumps(context["chart_data"], separators=(",", ":"), allow_nan=False)
    # Only a tag, which starts with `<`, can end a script element.
    return context | {"chart_data": Markup(data.replace("<", "\\u003c"))}


# One run


def _run_context(run: Run, view: RunView) -> dict[str, Any]:
    plan, options = get_mapping(run.about, "plan"), option_texts(run)
    parts = ("weights", "optimizer", "activations", "head")
    return {
        "run": run,
        "view": view,
        "figures": run_figures(view),
        "header": _settings(run, view),
        "epochs": run.progress.epochs[-_MAX_EPOCHS:],
        "skipped": [
            (step.step, step.reason, join_few(step.rows, _MAX_ROWS))
            for step in run.progress.skipped[:_MAX_SKIPPED]
        ],
        "predicted": predicted_fractions(run),
        "measured": measured_plan_values(run),
        "memory_limit": number(plan, "memory", "limit"),
        "recompute": plan.get("grad_checkpoint") is True,
        "memory_parts": [(max(number(plan, "memory", name) or 0.0, 0.0), name) for name in parts],
        "ledgers": [ledger.as_dict() for ledger in run.ledgers],
        "lengths": _lengths(run),
        "changed": [
            (flag, value, default) for flag, (value, default, differ) in options.items() if differ
        ],
        "defaults": [(flag, value) for flag, (value, _, differ) in options.items() if not differ],
        "origin": _origin(run, view),
        "rewards": reward_context(run, view),
        **_chart_context(charts_of(run, view)),
        **evaluation_context(run, view),
    }


def _settings(run: Run, view: RunView) -> dict[str, str]:
    config, lora = run.config, ""
    if (rank := config.get("rank")) is not None:
        lora = f"rank {option_text(rank)}, alpha {option_text(config.get('alpha'))}"
        lora += f" on {option_text(config.get('targets', ''))}"
    return {
        "Run": view.name,
        "Model": get_str(config, "model_path"),
        "Data": ", ".join(view.data),
        "LoRA": lora,
        "Learning rate": option_text(config["lr"]) if "lr" in config else "",
        "Device": get_str(run.about, "device"),
        "Started": minute_of(view.started),
    }


def evaluation_context(run: Run, view: RunView) -> dict[str, Any]:
    model = get_str(run.config, "model_path") or "MODEL"
    how = "--generate"
    if view.is_rewarded:
        rewards = run.config.get("reward")
        named = rewards if isinstance(rewards, list) else ["REWARD"]
        how = " ".join(f"--reward {shlex.quote(str(each))}" for each in named)
    elif view.objective != "sft":
        how = f"--objective {view.objective} --generate"
    return {
        "evaluation": run.evaluation,
        "evaluation_figures": _figures(run.evaluation) if run.evaluation else {},
        "evaluation_rewards": _reward_rows(run.evaluation.rewards if run.evaluation else ()),
        "eval_command": f"mlxtune eval --model-path {model} --adapter {run.name} --data FILE {how}",
    }


def _figures(evaluation: Evaluation) -> dict[str, str]:
    adapted, change = evaluation.adapted, evaluation.difference
    figures = {f"loss of {evaluation.baseline_name}": loss_text(evaluation.baseline.loss)}
    if adapted is not None and change is not None:
        low, high = signed_loss(change.low), signed_loss(change.high)
        interval = f"{change.confidence:.0%} interval {low} to {high}"
        interval = "all rows alike" if change.is_alike else interval
        figures["loss with the adapter"] = loss_text(adapted.loss)
        figures[f"change, {interval}"] = signed_loss(change.loss)
    if pref := evaluation.preference:
        figures = {
            f"{'chosen answers preferred' if pref.pairs else 'good above bad'} before": (
                f"{pref.before:.0%}"
            ),
            f"after, {pref.confidence:.0%} interval of the change "
            f"{100 * pref.low:+.0f} to {100 * pref.high:+.0f} points": f"{pref.after:.0%}",
            **figures,
        }
    if generated := evaluation.generated:
        answers, match = pluralize(generated.rows, "answer"), generated.exact_match
        figures[f"of {answers} exact before"] = f"{match.base:,}"
        if match.adapted is not None:
            figures[f"of {answers} exact after"] = f"{match.adapted:,}"
    return figures


def _reward_rows(changes: Sequence[RewardChange]) -> list[tuple[str, ...]]:
    return [
        (
            f"{'sampled' if each.sampled else 'greedy'} answers"
            + f": {each.name}" * bool(each.name),
            f"{each.before:.3f}",
            f"{each.after:.3f}",
            f"{each.after - each.before:+.3f}",
            f"{each.low:+.3f} to {each.high:+.3f}",
        )
        for each in changes
    ]


def _lengths(run: Run) -> dict[str, Any] | None:
    """Return statistics of the tokens per example; None if the run recorded none."""
    recorded = get_mapping(run.about, "lengths")
    lengths = {
        name: {key: number(recorded, name, key) for key in ("p50", "p95", "max", "mean", "total")}
        for name in ("tokens", "supervised")
    }
    return lengths if recorded else None


def _origin(run: Run, view: RunView) -> list[tuple[str, str]]:
    """Return the names and values of a run's inputs, versions and files, without its options."""
    pairs = [
        ("run", str(run.folder)),
        ("adapter", view.adapter),
        ("adapter's SHA-256", view.sha256),
        ("base model", get_str(run.about, "model", "description")),
        ("base model's hash", get_str(run.metadata, "base_hash")),
        ("data's hash", get_str(run.about, "data_hash")),
        ("LoRA", get_str(run.about, "lora", "description")),
        ("template", get_str(run.about, "template")),
        ("device", get_str(run.about, "device")),
        ("checkpoints", ", ".join(run.checkpoints)),
    ]
    pairs += [(name, str(version)) for name, version in get_mapping(run.about, "versions").items()]
    return [(name, value) for name, value in pairs if value]


# Several runs


def _comparison_context(runs: Sequence[Run], views: Sequence[RunView]) -> dict[str, Any]:
    comparable = validated_alike(runs)
    measures = measure_of(views)
    losses = [view.best_val_loss for view in views if view.best_val_loss is not None and comparable]
    is_one = " or " not in measures
    styles = [style_of(index) for index in range(len(runs))]
    return {
        "views": views,
        "styles": styles,
        "results": list(zip(views, styles, *zip(*map(_judgement, runs), strict=True), strict=True)),
        "sentence": comparison_headline(views, comparable),
        "comparable": comparable,
        "incomparable": _INCOMPARABLE if measures == LOSS_MEASURE else _OTHER_REWARDS,
        "measure": measures,
        "best": min(losses, default=None) if is_one else None,
        "differing": differing_options(runs),
        "short_names": [PurePath(view.name).name for view in views],
        **_chart_context(comparison_charts(runs, views)),
    }


def _judgement(run: Run) -> tuple[str, str]:
    """Return a run's verdict, and how many of its answers are exact; dashes if unknown."""
    evaluation, none = run.evaluation, "–"
    if evaluation is None or evaluation.verdict is None:
        return none, none
    verdict = f"{'hardly ' * evaluation.hardly}{evaluation.verdict}"
    generated = evaluation.generated
    if generated is None or generated.exact_match.adapted is None:
        return verdict, none
    return verdict, f"{generated.exact_match.adapted:,} of {generated.rows:,}"


def comparison_headline(views: Sequence[RunView], comparable: bool) -> str:
    """Return a headline, which names the best run if all were validated on the same rows."""
    validated = [view for view in views if view.best_val_loss is not None]
    runs, measures = pluralize(len(views), "run"), measure_of(views)
    if not validated or " or " in measures:
        return f"{runs} side by side"
    if not comparable:
        rewards = "" if measures == LOSS_MEASURE else " or rewards"
        return f"{runs} side by side, validated on different rows{rewards}"
    best = min(validated, key=lambda each: each.best_val_loss or 0.0)
    most = "highest" if measures == REWARD_MEASURE else "lowest"
    value = best.validation_text(best.best_val_loss)
    return f"Of {runs}, {best.name} has the {most} {measures}, {value}"


@dataclass(frozen=True)
class ResultCard:
    """Shows a run in a notebook; `code` is the code to type next."""

    run: Run
    code: str

    def html(self) -> str:
        view = RunView.of(self.run)
        picture, _ = draw(main_chart(self.run, view), 0)
        return str(
            render(
                "result_card.html",
                view=view,
                verdict=verdict_line(view.verdict),
                figures=run_figures(view),
                chart=picture,
                style=Markup(asset("result_card.css") + asset("chart.css")),
                next=self.code,
            )
        )

    def text(self) -> str:
        view = RunView.of(self.run)
        figures = (f"{value}  {name}" for name, value in run_figures(view).items())
        return "\n".join([f"{view.headline}.", verdict_line(view.verdict), *figures, self.code])
