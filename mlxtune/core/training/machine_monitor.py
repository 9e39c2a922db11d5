"""A run's response to its machine's memory pressure, battery, heat and sleep."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxtune.core.data.encode import Example
from mlxtune.core.formatting import duration
from mlxtune.core.machine.conditions import Conditions, Pressure, seconds_asleep
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.core.training.pipeline import Pipeline

# Shorter sleep is not reported.
_SLEPT_SECONDS = 10.0
# Seconds between a paused run's checks for Ctrl-C and mains power.
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class MachineDemand:
    """The machine's demand on a run: less memory, at a `pressure` above normal, or a `pause`."""

    pressure: Pressure
    pause: bool


@dataclass
class MachineMonitor:
    """Watches the machine's memory pressure, battery, heat and sleep during a run.

    `conditions` returns the latest reading, `should_stop` whether the run was asked to stop, and
    `asleep` the number of seconds that the machine has slept so far. `observer` receives the
    events.
    """

    conditions: Callable[[], Conditions] = Conditions
    observer: TrainingObserver = field(default_factory=TrainingObserver)
    pause_on_battery: bool = False
    should_stop: Callable[[], bool] = lambda: False
    asleep: Callable[[], float] = seconds_asleep
    wait: Callable[[float], object] = time.sleep

    def __post_init__(self) -> None:
        self._latest = self.conditions()
        self._thermal = ""
        self._slept = self.asleep()
        # The highest pressure since it was last normal.
        self._demanded = Pressure.NORMAL

    def check(self, step: int) -> MachineDemand | None:
        """Read the machine's conditions after a step, report changes, and return any demand.

        Each level of pressure leads to one demand until the pressure is normal again: small Macs
        are often at the warning level, and clearing the cache at each reading would make it
        useless.
        """
        self._latest = latest = self.conditions()
        asleep = self.asleep()
        slept = asleep - self._slept
        self._slept = asleep
        if slept >= _SLEPT_SECONDS:
            message = f"the machine slept for {duration(slept)} after step {step}"
            self.observer.on_note("Sleep", f"{message}; times and rates exclude the sleep")
        if latest.thermal != self._thermal:
            self._thermal = latest.thermal
            self.observer.on_thermal(latest.thermal)
        demanded, pressure = self._demanded, latest.pressure
        self._demanded = Pressure.NORMAL if pressure is Pressure.NORMAL else max(demanded, pressure)
        if pressure <= demanded:
            pressure = Pressure.NORMAL
        demand = MachineDemand(pressure, self._should_pause())
        return demand if demand.pause or pressure > Pressure.NORMAL else None

    def respond(
        self,
        demand: MachineDemand,
        pipeline: Pipeline,
        examples: Callable[[], Sequence[Example]],
        step: int,
    ) -> bool:
        """Release memory and wait for mains power, as demanded; no step may be running.

        `examples` returns the examples of the next step, whose sampling may take memory and
        minutes. Return whether micro-batches were halved.
        """
        halved = False
        if demand.pressure > Pressure.NORMAL:
            halved = self._relieve(demand.pressure, pipeline, examples, step)
        if demand.pause:
            self.observer.on_problem(
                f"on battery: paused after step {step} until plugged in; Ctrl-C stops the run"
            )
            while self._should_pause():
                self.wait(_POLL_SECONDS)
                self._latest = self.conditions()
            if not self.should_stop():
                self.observer.on_note("Power", "plugged in: training continues")
        return halved

    def _should_pause(self) -> bool:
        return self.pause_on_battery and bool(self._latest.on_battery) and not self.should_stop()

    def _relieve(
        self,
        pressure: Pressure,
        pipeline: Pipeline,
        examples: Callable[[], Sequence[Example]],
        step: int,
    ) -> bool:
        pipeline.relieve_memory()
        if pressure is Pressure.WARN:
            self.observer.on_problem(
                f"the machine is short of memory after step {step}: cached memory was freed"
            )
            return False
        tokens = pipeline.relieve_memory(halve_for=examples())
        how = "micro-batches cannot be halved: close other programs"
        if tokens is not None:
            how = f"micro-batches of up to {tokens:,} tokens from now on"
        self.observer.on_problem(f"the machine is very short of memory after step {step}: {how}")
        return tokens is not None
