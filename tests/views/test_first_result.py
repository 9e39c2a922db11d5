"""A line reports that kernels are being compiled if a GPU's first result is late."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mlxtune.session import trained_model
from mlxtune.views.console import RunConsole
from mlxtune.views.first_result import COMPILING, SECONDS, FirstResult, start_timer
from tests.command import Cli
from tests.core.training.records import step_record
from tests.paths import DATA
from tests.slow import long, slow
from tests.views.test_console import run_start
from tests.waiting import SECONDS as PATIENCE

DEMO = ("--model-path", DATA / "demo-qwen3")


class Clock:
    """A clock that tests advance: timers whose time has come act."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started = 0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def start(self, seconds: float, act: Callable[[], None]) -> Any:
        self.started += 1
        timer = (self.now + seconds, act)
        self._timers.append(timer)
        return SimpleNamespace(cancel=lambda: timer in self._timers and self._timers.remove(timer))

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self._timers if timer[0] <= self.now]
        self._timers = [timer for timer in self._timers if timer not in due]
        for _, act in due:
            act()

    @property
    def waiting(self) -> int:
        """The number of timers that may still act."""
        return len(self._timers)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_only_the_first_late_result_is_announced(clock: Clock) -> None:
    late: list[float] = []
    first = FirstResult(lambda: late.append(clock.now), clock.start)
    clock.pass_by(100)
    first.arrived()  # nothing was waited for
    first.wait()
    first.wait()
    clock.pass_by(SECONDS - 0.1)
    assert late == []
    clock.pass_by(0.1)
    assert late == [100 + SECONDS]
    first.wait()
    assert clock.waiting == 0


def test_no_timeout_follows_a_result(clock: Clock) -> None:
    late: list[bool] = []
    first = FirstResult(lambda: late.append(True), clock.start)
    first.wait()
    first.stop()
    assert clock.waiting == 0
    first.wait()
    first.arrived()
    first.wait()
    assert (clock.started, clock.waiting, late) == (2, 0, [])


@pytest.mark.parametrize(
    "act",
    [
        lambda console: console.on_step(step_record(1)),
        lambda console: console.on_evaluated(1, 2),
        lambda console: console.on_sampled(1, 2),
        lambda console: console.show("evaluating"),
        lambda console: console.result_arrived(),
        lambda console: console.close(),
        lambda console: console.on_end(),
    ],
    ids=["step", "evaluated", "sampled", "progress", "answer", "close", "end"],
)
def test_compiling_is_announced_unless_a_result_arrived(
    clock: Clock, act: Callable[[RunConsole], None]
) -> None:
    for comes in (False, True):
        text = StringIO()
        console = RunConsole(console=Console(file=text, width=200), start_timer=clock.start)
        console.on_start(run_start(), None)
        console.await_result()
        console.say("LoRA", "a line that is no result")
        if comes:
            act(console)
        clock.pass_by(SECONDS)
        assert (COMPILING in text.getvalue()) is not comes


def test_quiet_console_starts_no_timer(clock: Clock) -> None:
    RunConsole(quiet=True, start_timer=clock.start).await_result()
    assert clock.started == 0


def test_timer_acts_while_the_main_thread_waits() -> None:
    came = threading.Event()
    timer = start_timer(0, came.set)
    assert came.wait(PATIENCE)
    timer.cancel()


CPU, GPU = (SimpleNamespace(on_cpu=lambda found=found: found) for found in (True, False))


@pytest.mark.parametrize(
    ("name", "waits"),
    # Between loading a model and the first message, chat waits for no result.
    [
        ("train", 1),
        slow("dry run", 1),
        long("eval", 1),
        ("generate", 1),
        slow("chat", 2),
        long("bench", 1),
    ],
)
def test_commands_wait_for_their_first_result_only_on_a_gpu(
    cli: Cli,
    chat: Path,
    model: Path,
    clock: Clock,
    name: str,
    waits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, few = ("--model-path", model, "--data", chat), ("--max-new-tokens", 3)
    arguments = {
        "train": ("train", *data, "--max-steps", 1, "--val-split", 0),
        "dry run": ("train", *data, "--dry-run"),
        "eval": ("eval", *data),
        "generate": ("generate", *DEMO, *few, "--prompt", "Hello"),
        "chat": ("chat", *DEMO, *few),
        "bench": ("bench", *data, "--steps", 1, "--repeats", 1),
    }

    def run() -> str:
        monkeypatch.setattr(sys, "stdin", StringIO("Hello\n"))
        outcome = cli(*arguments[name])
        assert outcome.code == 0, outcome.err
        return outcome.err

    defaults: Any = RunConsole.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "start_timer", clock.start)
    for device, started in ((CPU, 0), (GPU, waits)):
        monkeypatch.setattr(trained_model, "default_device", device)
        run()
        assert clock.started == started
    assert (clock.started, clock.waiting) == (waits, 0)

    wait = FirstResult.wait

    def wait_long(first: FirstResult) -> None:
        wait(first)
        clock.pass_by(SECONDS)

    monkeypatch.setattr(FirstResult, "wait", wait_long)
    assert run().count(COMPILING) == 1
