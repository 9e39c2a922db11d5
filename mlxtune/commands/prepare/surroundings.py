"""The machine around a run: kept awake, and watched."""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mlxtune.config import RunConfig
from mlxtune.core.files import processes
from mlxtune.core.machine.conditions import ConditionsWatch, Sensors
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.core.training.surroundings import Surroundings

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
        process = processes.start(command, stdin=processes.PIPE)
    try:
        yield
    finally:
        if process is not None:
            processes.end(process)


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
