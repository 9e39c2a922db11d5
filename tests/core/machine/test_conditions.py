"""Conditions from the system's commands and files, which are fakes here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mlxtune.core.machine import conditions
from mlxtune.core.machine.conditions import Conditions, ConditionsPoller, Pressure, Sensors
from tests.waiting import wait_until

Fake = Callable[[str, str], None]
# On an Apple chip, and on an Intel chip.
NO_THERM = "Note: No thermal warning level has been recorded"
THERM = "CPU Power notify\n\tCPU_Scheduler_Limit \t= 100\n\tCPU_Speed_Limit \t= {}\n"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a function that makes a command print a text; PATH has only such commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands))

    def write(name: str, text: str) -> None:
        (commands / f"{name}.out").write_text(text)
        script = (
            f'#!/bin/sh\nprintf "%s\\n" "$*" >> {commands}/{name}.asked\nexec /bin/cat $0.out\n'
        )
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)

    return write


def mac() -> Sensors:
    return Sensors("Darwin")


# Memory pressure


@pytest.mark.parametrize(
    ("level", "pressure"),
    [
        ("1", Pressure.NORMAL),
        ("2", Pressure.WARN),
        ("4", Pressure.CRITICAL),
        ("", Pressure.NORMAL),
        ("sysctl: unknown oid", Pressure.NORMAL),
    ],
)
def test_pressure_of_a_mac_is_the_kernels_level(
    fake: Fake, tmp_path: Path, level: str, pressure: Pressure
) -> None:
    fake("sysctl", level)
    assert mac().pressure() is pressure
    asked = (tmp_path / "bin" / "sysctl.asked").read_text()
    assert asked == "-n kern.memorystatus_vm_pressure_level\n"


@pytest.mark.parametrize(
    ("some", "full", "pressure"),
    [
        ("0.00", "0.00", Pressure.NORMAL),
        ("9.99", "5.00", Pressure.NORMAL),
        ("10.00", "5.00", Pressure.WARN),
        ("80.00", "19.99", Pressure.WARN),
        ("80.00", "20.00", Pressure.CRITICAL),
    ],
)
def test_pressure_of_linux_is_the_fraction_of_time_waiting_for_memory(
    tmp_path: Path, some: str, full: str, pressure: Pressure
) -> None:
    text = "\n".join(
        f"{name} avg10={fraction} avg60=99.00 avg300=99.00 total=80235"
        for name, fraction in (("some", some), ("full", full))
    )
    path = tmp_path / "memory"
    path.write_text(text)
    assert Sensors("Linux", path).pressure() is pressure


def test_without_commands_and_files_all_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("psutil.sensors_battery", lambda: None)
    monkeypatch.setattr("psutil.sensors_temperatures", dict, raising=False)
    for sensors in (mac(), Sensors("Linux", tmp_path / "missing")):
        assert sensors.pressure() is Pressure.NORMAL
        assert sensors.on_battery() is sensors.saves_power() is None
        assert sensors.thermal() == ""


# Battery


@pytest.mark.parametrize(("plugged", "on_battery"), [(True, False), (False, True), (None, None)])
def test_machine_runs_on_battery_unless_it_is_plugged_in(
    monkeypatch: pytest.MonkeyPatch, plugged: bool | None, on_battery: bool | None
) -> None:
    battery = SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr("psutil.sensors_battery", lambda: battery)
    assert mac().on_battery() is on_battery


@pytest.mark.parametrize(("name", "on_battery"), [("BAT0", True), ("hidpp_battery_0", None)])
def test_battery_of_a_mouse_is_not_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, on_battery: bool | None
) -> None:
    monkeypatch.setattr("psutil.sensors_battery", lambda: SimpleNamespace(power_plugged=False))
    sensors = Sensors("Linux", supplies=tmp_path)
    assert sensors.on_battery() is None
    (tmp_path / name).mkdir()
    assert sensors.on_battery() is on_battery


@pytest.mark.parametrize(
    ("settings", "saves"),
    [(" lowpowermode   1", True), (" lowpowermode   0", False), (" powermode   2", False)],
)
def test_low_power_mode_of_a_mac_is_in_its_settings(fake: Fake, settings: str, saves: bool) -> None:
    fake("pmset", f"Currently in use:\n standby   1\n{settings}\n displaysleep   10")
    assert mac().saves_power() is saves


# Heat


@pytest.mark.parametrize(
    ("therm", "state", "word"),
    [
        (NO_THERM, "0", ""),
        (NO_THERM, "1", "fair"),
        (NO_THERM, "2", "serious"),
        (NO_THERM, "3", "critical"),
        (NO_THERM, "undefined", ""),
        (THERM.format(100), "0", ""),
        (THERM.format(60), "0", "CPU at 60%"),
    ],
)
def test_heat_of_a_mac_is_its_thermal_state_or_a_limited_speed(
    fake: Fake, therm: str, state: str, word: str
) -> None:
    fake("pmset", therm)
    fake("osascript", state)
    assert mac().thermal() == word


@pytest.mark.parametrize(
    ("current", "high", "critical", "word"),
    [
        (95.0, 95.0, 105.0, "hot"),
        (94.9, 95.0, 105.0, ""),
        (95.0, None, 95.0, "hot"),
        (95.0, None, None, ""),
        (40.0, 0.0, -274.0, ""),
    ],
)
def test_linux_is_hot_at_a_limit_of_a_chip(
    monkeypatch: pytest.MonkeyPatch,
    current: float,
    high: float | None,
    critical: float | None,
    word: str,
) -> None:
    cool = SimpleNamespace(current=30.0, high=95.0, critical=105.0)
    chips = {"a": [cool], "b": [SimpleNamespace(current=current, high=high, critical=critical)]}
    monkeypatch.setattr("psutil.sensors_temperatures", lambda: chips, raising=False)
    assert Sensors("Linux").thermal() == word


# The watch


@dataclass(frozen=True)
class Scripted:
    """Sensors that report each pressure of a list in turn, and then always the last."""

    pressures: list[Pressure]

    def pressure(self) -> Pressure:
        return self.pressures.pop(0) if len(self.pressures) > 1 else self.pressures[0]

    def on_battery(self) -> bool:
        return True

    def thermal(self) -> str:
        return "fair"


def test_watch_has_a_reading_at_once_and_new_ones_later() -> None:
    # The thread does not read again during the test.
    with ConditionsPoller(cast(Sensors, Scripted([Pressure.NORMAL])), seconds=60) as watch:
        assert watch.latest == Conditions(Pressure.NORMAL, True, "fair")
    sensors = cast(Sensors, Scripted([Pressure.NORMAL, Pressure.CRITICAL]))
    with ConditionsPoller(sensors, seconds=0.001) as watch:
        wait_until(lambda: watch.latest.pressure is Pressure.CRITICAL)
        assert watch.latest == Conditions(Pressure.CRITICAL, True, "fair")
        before = watch.latest
        wait_until(lambda: watch.latest is not before)
    # Leaving waits for at most one reading of the thread.
    wait_until(lambda: not watch._thread.is_alive())


# Sleep


def test_sleep_is_the_difference_of_two_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CLOCK_MONOTONIC_RAW" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
    monkeypatch.setattr(time, "clock_gettime", {getattr(time, name): 5000.0}.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: 3800.0)
    assert conditions.seconds_asleep() == 1200.0


def test_clocks_of_steps_and_rates_stop_while_the_machine_sleeps() -> None:
    # Both clocks are documented to stop; CLOCK_UPTIME_RAW is mach_absolute_time too.
    for clock in ("monotonic", "perf_counter"):
        used = time.get_clock_info(clock).implementation
        assert used in ("clock_gettime(CLOCK_MONOTONIC)", "mach_absolute_time()")
        assert (used == "mach_absolute_time()") == (sys.platform == "darwin")
