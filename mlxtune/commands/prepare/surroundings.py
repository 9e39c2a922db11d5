"""The machine around a run: kept awake, and watched."""

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mlxtune.config import RunConfig
from mlxtune.core.machine.conditions import ConditionsWatch, Sensors
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.core.training.surroundings import Surroundings

_END_SECONDS = 2.0
# `cat` ends with the pipe to it, which the system closes however this process ends.
_LINUX = (
    *("systemd-inhibit", "--what=idle:sleep", "--mode=block"),
    *("--who=mlxtune", "--why=training", "cat"),
)


@contextmanager
def kept_awake(system: str = platform.system()) -> Iterator[None]:
    """Keep the machine, but not its display, from sleeping while idle, until this process ends.

    Does nothing where the system has no command for that, or refuses.
    """
    command = ("caffeinate", "-i", "-w", str(os.getpid())) if system == "Darwin" else _LINUX
    process = None
    with suppress(OSError):
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # After Ctrl-C, the run still saves its state.
            start_new_session=True,
        )
    try:
        yield
    finally:
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def watched_surroundings(
    run: RunConfig, asked: Callable[[], bool], sensors: Sensors | None = None
) -> Iterator[Callable[[TrainingObserver], Surroundings]]:
    """Watch the machine; yield what makes a trainer's surroundings. `asked` returns if to stop."""
    with ConditionsWatch(sensors or Sensors()) as watch:

        def surroundings(observer: TrainingObserver) -> Surroundings:
            return Surroundings(
                lambda: watch.latest,
                observer,
                pause_on_battery=run.pause_on_battery,
                asked=asked,
            )

        yield surroundings
