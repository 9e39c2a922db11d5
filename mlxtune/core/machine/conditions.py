"""What changes on a machine while it trains: memory pressure, battery, heat, and sleep.

All of it is read from the system's own commands and files; `root` stands for / in tests.
"""

import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from mlxtune.core.files.reading import read_kernel_file
from mlxtune.core.machine.facts import Power, parse_pmset, tool_output

# macOS's kern.memorystatus_vm_pressure_level.
_MAC_WARN, _MAC_CRITICAL = 2, 4
# Percent of the last 10 s in which some, or all, of the programs waited for memory. systemd-oomd
# ends programs at 60.
_SOME_WARN, _FULL_CRITICAL = 10.0, 20.0
# NSProcessInfo.thermalState, which needs no root. pmset knows the heat of Intel's chips only.
_THERMAL = "ObjC.import('Foundation'); $.NSProcessInfo.processInfo.thermalState"
_THERMAL_WORDS = {"1": "fair", "2": "serious", "3": "critical"}
# A trip point at which Linux slows the processor down, and the least that is no placeholder.
_TRIPS, _LEAST_TRIP = ("passive", "hot", "critical"), 30_000
# Seconds between two readings of the memory, and of the rest, which changes more slowly.
_SECONDS, _SLOW_SECONDS = 3.0, 12.0


class Pressure(IntEnum):
    """How short the memory of the whole machine is."""

    NORMAL = 0
    WARN = 1
    CRITICAL = 2


@dataclass(frozen=True)
class Conditions:
    """One reading. `on_battery` is None if unknown, `thermal` empty if nominal or unknown."""

    pressure: Pressure = Pressure.NORMAL
    on_battery: bool | None = None
    thermal: str = ""


@dataclass(frozen=True)
class Sensors:
    """Reads the conditions of a machine."""

    system: str = platform.system()
    root: Path = Path("/")

    def pressure(self) -> Pressure:
        """Return the memory pressure; NORMAL if the system does not say."""
        if self.system == "Darwin":
            text = tool_output("sysctl", "-n", "kern.memorystatus_vm_pressure_level").strip()
            level = int(text) if text.isdecimal() else 0
            if level >= _MAC_CRITICAL:
                return Pressure.CRITICAL
            return Pressure.WARN if level >= _MAC_WARN else Pressure.NORMAL
        shares = dict(re.findall(r"(?m)^(\w+) avg10=([\d.]+)", self._text("proc/pressure/memory")))
        if float(shares.get("full", 0)) >= _FULL_CRITICAL:
            return Pressure.CRITICAL
        return Pressure.WARN if float(shares.get("some", 0)) >= _SOME_WARN else Pressure.NORMAL

    def power(self) -> Power:
        """Return whether the machine runs on battery, and saves power."""
        if self.system == "Darwin":
            return parse_pmset(tool_output("pmset", "-g", "batt"), tool_output("pmset", "-g"))
        return Power(on_battery=self._on_battery_of_linux())

    def thermal(self) -> str:
        """Return one word, or two, for how heat slows the machine; empty if it does not."""
        if self.system != "Darwin":
            return "hot" if any(map(self._is_hot, self._folders("sys/class/thermal"))) else ""
        speed = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", tool_output("pmset", "-g", "therm"))
        if speed and int(speed[1]) < 100:
            return f"CPU at {int(speed[1])}%"
        state = tool_output("osascript", "-l", "JavaScript", "-e", _THERMAL).strip()
        return _THERMAL_WORDS.get(state, "")

    def _on_battery_of_linux(self) -> bool | None:
        batteries, sources = [], []
        for folder in self._folders("sys/class/power_supply"):
            kind = self._text(folder / "type")
            if kind in ("Mains", "USB"):
                sources.append(self._text(folder / "online"))
            # Mice and headphones have batteries too.
            elif kind == "Battery" and self._text(folder / "scope") != "Device":
                batteries.append(self._text(folder / "status"))
        if not batteries:
            return None
        return "1" not in sources and "Discharging" in batteries

    def _is_hot(self, zone: Path) -> bool:
        """Return whether a thermal zone has reached a trip point."""
        trips = (
            self._whole(kind.with_name(kind.name.replace("_type", "_temp")))
            for kind in zone.glob("trip_point_*_type")
            if self._text(kind) in _TRIPS
        )
        temperature = self._whole(zone / "temp")
        return any(_LEAST_TRIP <= trip <= temperature for trip in trips)

    def _folders(self, path: str) -> Iterator[Path]:
        with suppress(OSError):
            yield from sorted((self.root / path).iterdir())

    def _whole(self, path: Path) -> int:
        text = self._text(path)
        return int(text) if text.isdecimal() else 0

    def _text(self, path: str | Path) -> str:
        with suppress(OSError):
            return read_kernel_file(self.root / path).strip()
        return ""


class ConditionsWatch:
    """Reads the conditions every few seconds in a thread, so that no step waits for a command.

    `latest` is a new object after each reading.
    """

    def __init__(self, sensors: Sensors, seconds: float = _SECONDS) -> None:
        self._sensors = sensors
        self._seconds = seconds
        self._slow_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conditions", daemon=True)
        self.latest = Conditions()

    def __enter__(self) -> "ConditionsWatch":
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
            on_battery, thermal = self._sensors.power().on_battery, self._sensors.thermal()
        self.latest = Conditions(self._sensors.pressure(), on_battery, thermal)


def seconds_asleep() -> float:
    """Return how long the machine has slept since it was started; 0 if that is unknown.

    Other than the wall clock, these are never set. `time.monotonic` and `time.perf_counter` stop
    while the machine sleeps.
    """
    # Linux's own name; macOS's MONOTONIC_RAW counts sleep too.
    name = "CLOCK_MONOTONIC_RAW" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
    clock = getattr(time, name, None)
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()
