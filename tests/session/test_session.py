"""A command opens each of its inputs once, and closes the model that it has trained."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlxtune
from mlxtune.backend.models import loading
from mlxtune.backend.workers.launch import WorkerRun
from mlxtune.backend.workers.workers import Workers
from mlxtune.commands import train as recipe
from mlxtune.config import TrainConfig
from mlxtune.core.steps import memory_plan
from mlxtune.session import dataset, judge, reader
from mlxtune.session.arguments import ResolvedOptions
from mlxtune.session.auto import with_auto_options
from mlxtune.session.run_session import RunSession
from mlxtune.session.session import TrainingSession
from mlxtune.views.console import RunConsole
from tests.hub_server import Dataset, Hub
from tests.models import sums, write_chat
from tests.slow import slow

Calls = Counter[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The number of calls by name, from now on."""
    counted: Calls = Counter()

    def count(module: Any, name: str) -> None:
        called: Callable[..., Any] = getattr(module, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return called(*arguments, **options)

        monkeypatch.setattr(module, name, counting)

    for module, name in (
        (dataset, "fetch"),
        (reader, "encode_file"),
        (loading, "open_base"),
        (memory_plan, "choose_memory_plan"),
    ):
        count(module, name)
    return counted


@pytest.fixture
def rows(hub: Hub, tmp_path: Path) -> str:
    """The name of a data set of the hub, with one file."""
    content = write_chat(tmp_path / "rows.jsonl", sums(20)).read_bytes()
    hub.datasets["org/sums"] = Dataset({"main": {"train.jsonl": content}})
    return "org/sums"


def start(model: Path, data: str, output: Path, **options: Any) -> None:
    """Start a run, and stop before its first step."""
    common: dict[str, Any] = {"model_path": model, "data": data, "quiet": True, "output": output}
    mlxtune.train(**common, **options, dry_run=True)


OPENED = {"fetch": 1, "encode_file": 1, "open_base": 1}


@pytest.mark.parametrize("auto", [slow(False), True])
def test_start_of_a_run_opens_each_input_once(
    model: Path, rows: str, tmp_path: Path, calls: Calls, auto: bool
) -> None:
    start(model, rows, tmp_path, auto=auto, no_cache=True)
    assert {name: calls[name] for name in OPENED} == OPENED


def test_plan_is_chosen_at_most_twice(
    model: Path, chat: Path, tmp_path: Path, calls: Calls
) -> None:
    """A larger limit and longer examples are further questions, which this run does not raise."""
    start(model, str(chat), tmp_path, memory_limit=10**6)
    assert calls["choose_memory_plan"] <= 2


@pytest.mark.parametrize("auto", [False, True])
def test_plan_opens_each_input_once(model: Path, rows: str, calls: Calls, auto: bool) -> None:
    mlxtune.plan(model_path=model, data=rows, auto=auto, quiet=True, no_cache=True)
    assert {name: calls[name] for name in OPENED} == OPENED


def test_inspection_and_evaluation_fetch_data_once(model: Path, rows: str, calls: Calls) -> None:
    mlxtune.inspect(model_path=model, data=rows, quiet=True)
    assert calls["fetch"] == 1
    mlxtune.evaluate(model_path=model, data=(f"{rows}:train",), quiet=True)
    assert calls["fetch"] == 2


def test_auto_session_shares_resources_and_leaves_first_unchanged(model: Path, chat: Path) -> None:
    options = TrainConfig(str(model), (str(chat),), auto=True)
    first = TrainingSession(options, RunConsole(quiet=True), ())
    chosen = with_auto_options(first)
    assert (first.config.auto, first.command) == (True, "")
    assert not chosen.config.auto
    assert chosen.command.startswith("mlxtune train")
    assert (chosen.base, chosen.reader, chosen.source) == (first.base, first.reader, first.source)


def test_released_model_is_not_opened_again(model: Path, chat: Path, calls: Calls) -> None:
    options = TrainConfig(str(model), (str(chat),))
    session = TrainingSession(options, RunConsole(quiet=True), ())
    session.release_base()
    for use in (lambda: session.base, session.release_base):
        with pytest.raises(AssertionError, match="released"):
            use()
    assert calls["open_base"] == 1


def test_trained_model_is_freed_before_the_adapter_is_judged(
    model: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, load_model = recipe.prepare_run, judge.load_model
    trained: list[weakref.ref[Any]] = []
    alive: list[Any] = []

    def remember(*arguments: Any, **options: Any) -> Any:
        parts = prepare(*arguments, **options)
        trained.append(weakref.ref(parts.base.model))
        return parts

    def look(*arguments: Any) -> Any:
        alive.append(trained[0]())
        return load_model(*arguments)

    monkeypatch.setattr(recipe, "prepare_run", remember)
    monkeypatch.setattr(judge, "load_model", look)
    common: dict[str, Any] = {"model_path": model, "data": chat, "quiet": True, "samples": 0}
    mlxtune.train(**common, output=tmp_path / "out", max_steps=1)
    assert alive == [None]


@pytest.mark.parametrize(
    ("first", "events"), [(True, ["read", "wait", "wait"]), (False, ["wait", "read", "wait"])]
)
def test_first_worker_of_a_machine_reads_data_before_the_others(
    model: Path, chat: Path, monkeypatch: pytest.MonkeyPatch, first: bool, events: list[str]
) -> None:
    """The second wait is for the run's own reading, which takes what --auto has read."""
    workers, order, encode_file = Workers(), [], reader.encode_file
    workers.world_size = 2
    monkeypatch.setattr(workers, "barrier", lambda: order.append("wait"))

    def read(*arguments: Any, **options: Any) -> Any:
        order.append("read")
        return encode_file(*arguments, **options)

    monkeypatch.setattr(reader, "encode_file", read)
    options = TrainConfig(str(model), (str(chat),), auto=True)
    worker_run = WorkerRun(workers, options, RunConsole(quiet=True), first_on_machine=first)
    session = RunSession(worker_run, ResolvedOptions(options, frozenset()))
    with_auto_options(session).load()
    assert order == events
