"""Conditions of a machine while it trains: memory pressure, battery, heat, and sleep.

psutil reads the battery and temperatures; system commands and files give the rest.
"""

import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from mlxtune.core.files import processes
from mlxtune.core.files.reading import read_kernel_file
from mlxtune.core.machine.facts import tool_output

# macOS's kern.memorystatus_vm_pressure_level.
_MAC_WARN, _MAC_CRITICAL = 2, 4
# The percentages of the last 10 s in which some programs, and all programs, were stalled on memory.
# At these values, pressure counts as a warning and as critical. systemd-oomd kills programs at 60.
_SOME_WARN_PERCENT, _FULL_CRITICAL_PERCENT = 10.0, 20.0
# NSProcessInfo.thermalState, which can be read without root. pmset reports heat for Intel chips
# only.
_THERMAL = "ObjC.import('Foundation'); $.NSProcessInfo.processInfo.thermalState"
_THERMAL_WORDS = {"1": "fair", "2": "serious", "3": "critical"}
# The lowest plausible temperature limit, in degrees Celsius: lower values are placeholders.
_MIN_LIMIT = 30.0
# `cat` ends with its input pipe, which the system closes however this process ends.
_INHIBIT_COMMAND = (
    *("systemd-inhibit", "--what=idle:sleep", "--mode=block"),
    *("--who=mlxtune", "--why=training", "cat"),
)
# The percentage of all processors from which other programs disturb a measurement.
_BUSY_PERCENT, _BUSY_SECONDS = 25.0, 0.5
# Seconds between two readings of the memory pressure, and of conditions that are slow to read.
_SECONDS, _SLOW_SECONDS = 3.0, 12.0


def busy() -> str | None:
    """Return a warning with its remedy if other programs use many of this machine's processors."""
    import psutil

    used = psutil.cpu_percent(interval=_BUSY_SECONDS)
    if used < _BUSY_PERCENT:
        return None
    return (
        f"other programs use {used:.0f}% of the processors, so that times vary and are too long: "
        "close them, and measure again"
    )


class Pressure(IntEnum):
    """The memory pressure of the whole machine."""

    NORMAL = 0
    WARN = 1
    CRITICAL = 2


@dataclass(frozen=True)
class Conditions:
    """One reading of the conditions.

    `on_battery` is None if unknown; `thermal` is empty without thermal throttling, or if
    unknown.
    """

    pressure: Pressure = Pressure.NORMAL
    on_battery: bool | None = None
    thermal: str = ""


@dataclass(frozen=True)
class Sensors:
    """Reads the conditions of a machine; `pressure_file` and `supplies` are Linux's paths."""

    system: str = platform.system()
    pressure_file: Path = Path("/proc/pressure/memory")
    supplies: Path = Path("/sys/class/power_supply")

    def pressure(self) -> Pressure:
        if self.system == "Darwin":
            text = tool_output("sysctl", "-n", "kern.memorystatus_vm_pressure_level").strip()
            level = int(text) if text.isdecimal() else 0
            if level >= _MAC_CRITICAL:
                return Pressure.CRITICAL
            return Pressure.WARN if level >= _MAC_WARN else Pressure.NORMAL
        text = ""
        with suppress(OSError):
            text = read_kernel_file(self.pressure_file)
        percentages = dict(re.findall(r"(?m)^(\w+) avg10=([\d.]+)", text))
        if float(percentages.get("full", 0)) >= _FULL_CRITICAL_PERCENT:
            return Pressure.CRITICAL
        return (
            Pressure.WARN
            if float(percentages.get("some", 0)) >= _SOME_WARN_PERCENT
            else Pressure.NORMAL
        )

    def on_battery(self) -> bool | None:
        """Return whether the machine runs on battery; None if unknown, or if it has no battery."""
        import psutil

        # On machines without a battery, psutil may report a mouse's battery.
        if self.system == "Linux" and not any(self.supplies.glob("BAT*")):
            return None
        battery = psutil.sensors_battery()
        plugged = None if battery is None else battery.power_plugged
        return None if plugged is None else not plugged

    def saves_power(self) -> bool | None:
        """Return whether a Mac is in Low Power Mode; None if unknown."""
        settings = tool_output("pmset", "-g") if self.system == "Darwin" else ""
        # The name is `powermode` on Macs that also have High Power Mode.
        mode = re.search(r"(?m)^\s*(?:lowpowermode|powermode)\s+(\d)", settings)
        return None if mode is None else mode[1] == "1"

    def thermal(self) -> str:
        """Describe thermal throttling in a few words; return an empty string if there is none."""
        if self.system != "Darwin":
            return "hot" if _is_hot() else ""
        speed = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", tool_output("pmset", "-g", "therm"))
        if speed and int(speed[1]) < 100:
            return f"CPU at {int(speed[1])}%"
        state = tool_output("osascript", "-l", "JavaScript", "-e", _THERMAL).strip()
        return _THERMAL_WORDS.get(state, "")


def _is_hot() -> bool:
    import psutil

    return any(
        _MIN_LIMIT <= limit <= sensor.current
        for chip in psutil.sensors_temperatures().values()
        for sensor in chip
        for limit in (sensor.high, sensor.critical)
        if limit is not None
    )


class ConditionsPoller:
    """Reads the conditions every few seconds in a thread, so that no step waits for a command.

    Each reading sets a new object as `latest`.
    """

    def __init__(self, sensors: Sensors, seconds: float = _SECONDS) -> None:
        self._sensors = sensors
        self._seconds = seconds
        self._slow_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conditions", daemon=True)
        self.latest = Conditions()

    def __enter__(self) -> "ConditionsPoller":
        self._read()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(self._seconds)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self._read()

    def _read(self) -> None:
        before, now = self.latest, time.monotonic()
        on_battery, thermal = before.on_battery, before.thermal
        if now >= self._slow_at:
            self._slow_at = now + min(_SLOW_SECONDS, 4 * self._seconds)
            on_battery, thermal = self._sensors.on_battery(), self._sensors.thermal()
        self.latest = Conditions(self._sensors.pressure(), on_battery, thermal)


@contextmanager
def keep_awake(system: str = platform.system()) -> Iterator[None]:
    """Keep the machine, but not its display, awake inside the block.

    The effect ends with this process at the latest. Does nothing if the system has no command for
    this purpose, or refuses.
    """
    command = (
        ("caffeinate", "-i", "-w", str(os.getpid())) if system == "Darwin" else _INHIBIT_COMMAND
    )
    process = None
    with suppress(OSError):
        process = processes.start(command, stdin=processes.PIPE)
    try:
        yield
    finally:
        if process is not None:
            processes.end(process)


def seconds_asleep() -> float:
    """Return how long the machine has slept since it was started; 0 if unknown.

    Unlike the wall clock, the clocks used here are never set. `time.monotonic` and
    `time.perf_counter` stop while the machine sleeps.
    """
    # Only Linux has CLOCK_BOOTTIME; macOS's CLOCK_MONOTONIC_RAW counts sleep too.
    name = "CLOCK_MONOTONIC_RAW" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
    clock = getattr(time, name, None)
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()
