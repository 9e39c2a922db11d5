"""The live page of runs: its frame, and its parts, which are sent to it whenever they change.

Runs are read from their folders, repeatedly while a page is open.
"""

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxtune.core.files.lock import holder_of
from mlxtune.core.formatting import duration, pluralize
from mlxtune.core.run.checkpoint import METRICS
from mlxtune.core.run.run_folder import (
    ABOUT,
    EVALUATION,
    LEDGER,
    LIVE_ANSWERS,
    LOCK,
    RESULT,
    previous_number,
    request_stop,
)
from mlxtune.core.run.stored_run import Run, find_runs, number, read_run, run_folder_at
from mlxtune.core.run.summary import RunView, measure_of, validated_alike
from mlxtune.errors import OutputError, one_line
from mlxtune.views.pages.charts import Chart, draw_all
from mlxtune.views.pages.page import PageType
from mlxtune.views.pages.reward_section import reward_context
from mlxtune.views.pages.run_charts import charts_of, comparison_charts, style_of
from mlxtune.views.pages.run_page import comparison_headline, evaluation_context
from mlxtune.views.parts import run_figures
from mlxtune.watch.asking import MAX_QUESTION_CHARS, Asker, Question, problem_of

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
_PARTS = (
    *("problem", "back", "head", "charts", "why_not", "latest", "sampled", "samples", "data"),
)
# The time left is estimated from this many recent steps.
_RECENT_STEPS = 50
_FILES = (METRICS, ABOUT, LEDGER, RESULT, EVALUATION, LIVE_ANSWERS)
# Seconds between checks of a run's files, seconds between checks for new runs, and the largest
# fraction of the time that reading may take.
_POLL_SECONDS, _SCAN_SECONDS, _MAX_READING_FRACTION = 1.0, 5.0, 0.1
# Seconds after which an empty event is sent, to see whether the page is still open.
_KEEPALIVE_SECONDS = 10.0
# The maximum number of runs shown: the newest runs of a folder.
MAX_RUNS = 12


def run_key(run: Path) -> str:
    """Return the name by which the page asks for a run."""
    return hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]


@dataclass
class _View:
    """A view that pages follow: its parts, the state of its files, and when to read them again."""

    parts: Parts = field(default_factory=dict)
    seen: Any = None
    due: float = 0.0


class LiveSite:
    """The site of `mlxtune watch`: all runs of a folder, or one run and its model's answers.

    A page follows a view: the name of a run, or "" for all runs. Files are only read while a page
    is open. `folder` is the path of a run, or a folder with runs below it. Raises OutputError if
    there is no run.
    """

    def __init__(self, folder: Path, asker: Asker) -> None:
        self.folder, self._asker = folder, asker
        with suppress(OutputError):
            self.folder = run_folder_at(folder)
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._views: dict[str, _View] = {}
        self._runs: dict[str, Path] = {}
        self._next_search = 0.0
        # The lock holders that were asked to stop, by run.
        self._stop_requests: dict[str, Mapping[str, Any] | None] = {}
        self._pages, self._last_closed_at = 0, time.monotonic()
        self._closed = False
        asker.on_change = self._notify
        if not self._find():
            run_folder_at(folder)

    def page(self) -> str:
        return render_page(self.folder)

    def follow(self, view: str, last: str) -> Iterator[tuple[str, str] | None]:
        """Yield events as in `Site.follow`: a hash of all parts, and the changed parts as JSON."""
        sent: Parts = {}
        with self._followed():
            quiet_since = time.monotonic()
            while not self._closed:
                parts = self._parts(view)
                name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
                if not sent and name == last:
                    sent = parts
                if changed := {k: v for k, v in parts.items() if sent.get(k) != v}:
                    sent, quiet_since = parts, time.monotonic()
                    yield name, json.dumps(changed)
                elif time.monotonic() - quiet_since > _KEEPALIVE_SECONDS:
                    quiet_since = time.monotonic()
                    yield None
                with self._changed:
                    self._changed.wait(_POLL_SECONDS)

    def act(self, action: str, values: Mapping[str, Any]) -> bool:
        run = self._runs.get(str(values.get("run")))
        if run is None:
            raise OutputError("this run no longer exists: reload the page")
        if action == "stop":
            self._stop_requests[run_key(run)] = holder_of(run / LOCK)
            request_stop(run)
            self._renew()
        elif action == "ask":
            self._asker.ask(run, values.get("question"))
        elif action == "cancel":
            self._asker.cancel()
        else:
            return False
        return True

    def idle_seconds(self) -> float:
        """Return the number of seconds since a page was last open or a run was last in progress."""
        with self._lock:
            training = any(holder_of(run / LOCK) is not None for run in self._find().values())
            if self._pages or training:
                self._last_closed_at = time.monotonic()
            return time.monotonic() - self._last_closed_at

    def close(self) -> None:
        """End the events of all pages, and the process that answers."""
        self._closed = True
        self._asker.close()
        self._notify()

    @contextmanager
    def _followed(self) -> Iterator[None]:
        self._pages += 1
        try:
            yield
        finally:
            self._pages -= 1
            self._last_closed_at = time.monotonic()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _renew(self) -> None:
        """Make all pages check the files now."""
        with self._lock:
            self._views.clear()
        self._notify()

    def _find(self) -> dict[str, Path]:
        """Return the runs to show; search for them again every few seconds."""
        if time.monotonic() >= self._next_search:
            started = time.monotonic()
            try:
                shown = [run_folder_at(self.folder)]
            except OutputError:
                every = find_runs(self.folder)
                shown = [run for run in every if previous_number(run.name) is None]
            shown = sorted(sorted(shown, key=_changed_at)[-MAX_RUNS:])
            self._runs = {run_key(run): run for run in shown}
            took = time.monotonic() - started
            self._next_search = time.monotonic() + max(_SCAN_SECONDS, took / _MAX_READING_FRACTION)
        return self._runs

    def _parts(self, name: str) -> Parts:
        with self._lock:
            runs = self._find()
            # If the run was deleted, show all runs.
            name = name if name in runs else ""
            selected = {name: runs[name]} if name else runs
            view = self._views.setdefault(name, _View())
            if time.monotonic() >= view.due:
                self._look(view, selected)
            parts = dict(view.parts)
        question = (
            self._asker.question_of(next(iter(selected.values()))) if len(selected) == 1 else None
        )
        return {**parts, "answers": render_answers(question)}

    def _look(self, view: _View, runs: Mapping[str, Path]) -> None:
        """Read the runs of a view if their files have changed."""
        started = time.monotonic()
        if (seen := [_state_of(run) for run in runs.values()]) != view.seen:
            view.seen, view.parts = seen, self._read(runs)
        took = time.monotonic() - started
        view.due = time.monotonic() + max(_POLL_SECONDS, took / _MAX_READING_FRACTION)

    def _read(self, runs: Mapping[str, Path]) -> Parts:
        # Errors in a run's files must not end the page.
        try:
            read = {key: read_run(run) for key, run in runs.items()}
            stopping = {
                key
                for key, run in read.items()
                if run.holder is not None and self._stop_requests.get(key) == run.holder
            }
            if len(read) != 1:
                return render_run_parts(read, stopping)
            ((key, run),) = read.items()
            several = len(self._runs) > 1
            return render_run(key, run, problem_of(run), several=several, stopping=bool(stopping))
        except Exception as problem:  # noqa: BLE001
            return {"head": "", "problem": f"The run cannot be shown: {one_line(problem)}"}


def _state_of(run: Path) -> list[Any]:
    """Return a value that changes whenever the files of a run change."""
    state: list[Any] = [holder_of(run / LOCK)]
    for name in _FILES:
        try:
            status = (run / name).stat()
        except OSError:
            state.append(None)
        else:
            state.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return state


def _changed_at(run: Path) -> float:
    """Return the time of a run's last record, or 0 without records."""
    try:
        return (run / METRICS).stat().st_mtime
    except OSError:
        return 0.0


# The page and its parts


def render_page(folder: Path) -> str:
    """Return the frame of the page, without its parts."""
    return PAGE.render("watch.html", folder=str(folder), longest_question=MAX_QUESTION_CHARS)


def render_run(key: str, run: Run, why_not: str, *, several: bool, stopping: bool) -> Parts:
    """Return the page's parts for one run; `why_not` says why its model answers no questions."""
    view = RunView.of(run)
    state = run_state(key, run, view, stopping=stopping)
    # The final evaluation has newer answers for the same rows.
    final = run.evaluation is not None
    latest = run.samples is not None and not final
    rewards = reward_context(run, view)
    return _parts(
        title=f"{state['done']} · {view.name}" if state["done"] else view.name,
        back="several" if several else "",
        head=_fragment("run_head.html", view=view, **state),
        **_charts(charts_of(run, view)),
        can_ask=not why_not,
        why_not=why_not if view.finished else "",
        latest=_fragment("latest.html", latest=run.samples) if latest else "",
        sampled=_fragment("sampled.html", rewards=rewards) if rewards["rewarded"] else "",
        samples=_fragment("evaluation.html", **evaluation_context(run, view)) if final else "",
        data=_fragment("ledgers.html", ledgers=[ledger.as_dict() for ledger in run.ledgers]),
    )


def render_run_parts(runs: Mapping[str, Run], stopping: Set[str]) -> Parts:
    """Return the page's parts for several runs, shown side by side."""
    views = [RunView.of(run) for run in runs.values()]
    rows = [
        {
            "view": view,
            "style": style_of(index),
            **run_state(key, run, view, stopping=key in stopping),
        }
        for index, ((key, run), view) in enumerate(zip(runs.items(), views, strict=True))
    ]
    title = pluralize(len(runs), "run")
    listed = list(runs.values())
    sentence = comparison_headline(views, validated_alike(listed))
    head = _fragment("runs_head.html", rows=rows, sentence=sentence, measure=measure_of(views))
    return _parts(title=title, head=head, **_charts(comparison_charts(listed, views)))


def run_state(key: str, run: Run, view: RunView, *, stopping: bool) -> dict[str, Any]:
    """Return a run's state, such as its progress and the time left, as values for a template."""
    total, running = view.total_steps, view.status == "running"
    left = seconds_left(run, view) if running else None
    limit = number(run.about, "plan", "memory", "limit")
    return {
        "key": key,
        "done": f"{100 * view.step / total:.0f}%" if running and total else "",
        "left": "" if left is None else f"about {duration(left)} left",
        "limit": limit,
        "figures": run_figures(view, limit),
        "running": running,
        "stopping": stopping,
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
    context = draw_all(charts)
    return {"charts": _fragment("charts.html", **context), "chart_data": context["chart_data"]}
