"""What the tools of a system print, read; their words are those of real machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.machine import facts
from mlxtune.core.machine.facts import Memory, Power

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                4000.
Pages active:                            400000.
Pages inactive:                          300000.
Pages speculative:                         1000.
Pages throttled:                              0.
Pages wired down:                        150000.
"""
MEMINFO = """\
MemTotal:       24737000 kB
MemFree:        19000000 kB
MemAvailable:   23000000 kB
SwapTotal:       2000000 kB
SwapFree:        1500000 kB
"""
BATTERY = """\
Now drawing from 'Battery Power'
 -InternalBattery-0 (id=4653155)\t85%; discharging; 5:31 remaining present: true
"""
SETTINGS = """\
System-wide power settings:
Currently in use:
 standby              1
 lowpowermode         {}
 displaysleep         10
"""


def test_what_a_mac_reports_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {
        "sysctl": "hw.memsize: 17179869184\nmachdep.cpu.brand_string: Apple M2\n"
        "sysctl.proc_translated: 1\nvm.swapusage: used = 1.00M\niogpu.wired_limit_mb: 0\n",
        "vm_stat": VM_STAT,
    }

    def output(*command: str) -> str:
        return outputs["sysctl" if command[0] == "sysctl" else " ".join(command)]

    monkeypatch.setattr(facts, "tool_output", output)
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.3", ("", "", ""), "arm64"))
    assert facts.read_system() == {
        **{"name": "macOS", "release": "15.3", "chip": "Apple M2", "translated": True},
        "memory": Memory(2**34, (4000 + 300000 + 1000) * 16384, 2**20),
        "wired_limit_mb": 0,
    }


def test_sysctl_is_read_by_name_with_what_it_does_not_know_left_out() -> None:
    text = "hw.memsize: 17179869184\nmachdep.cpu.brand_string: Apple M2: Pro\n\nnonsense\n"
    assert facts.parse_pairs(text) == {
        "hw.memsize": "17179869184",
        "machdep.cpu.brand_string": "Apple M2: Pro",
    }


def test_swap_of_a_mac_is_in_mebibytes() -> None:
    text = "total = 2048.00M  used = 1033.75M  free = 1014.25M  (encrypted)"
    assert facts.parse_swap(text) == int(1033.75 * 2**20)
    assert facts.parse_swap("") is None


def test_available_memory_of_a_mac_is_what_it_would_give() -> None:
    assert facts.parse_vm_stat(VM_STAT) == (4000 + 300000 + 1000) * 16384
    assert facts.parse_vm_stat("") is None


def test_memory_of_linux_is_in_kibibytes() -> None:
    assert facts.parse_meminfo(MEMINFO) == Memory(24737000 * 1024, 23000000 * 1024, 500000 * 1024)
    assert facts.parse_meminfo("") == Memory()
    assert facts.parse_meminfo("MemTotal: 8 kB\n") == Memory(8192, None, 0), "as on WSL 1"


@pytest.mark.parametrize(
    ("limit", "total", "available"),
    [(2**52, 100, 80), (90, 90, 80), (50, 50, 50)],
)
def test_container_has_no_more_memory_than_its_limit(
    limit: int, total: int, available: int
) -> None:
    text = "MemTotal: 100 kB\nMemAvailable: 80 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    assert facts.parse_meminfo(text, limit * 1024) == Memory(total * 1024, available * 1024, 0)


def test_power_of_a_mac_is_read_from_both_of_its_reports() -> None:
    assert facts.parse_pmset(BATTERY, SETTINGS.format(1)) == Power(True, True)
    mains = BATTERY.replace("Battery Power", "AC Power")
    assert facts.parse_pmset(mains, SETTINGS.format(0)) == Power(False, False)
    assert facts.parse_pmset(mains, " powermode   2\n").saving is False
    assert facts.parse_pmset("", "") == Power(None, None)


def test_two_macs_of_one_name_are_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    boots = iter(["6B8A-1", "6B8A-1", "77C0-2", ""])
    asked: list[tuple[str, ...]] = []

    def output(*command: str) -> str:
        asked.append(command)
        return next(boots)

    monkeypatch.setattr(facts.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(facts.platform, "node", lambda: "MacBook-Pro.local")
    monkeypatch.setattr(facts, "tool_output", output)
    first, again, other, unknown = (facts.machine_id() for _ in range(4))
    assert first == again != other
    assert unknown.startswith("MacBook-Pro.local/")
    assert asked[0] == ("sysctl", "-n", "kern.bootsessionuuid")


def test_linux_machine_is_told_by_its_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    read = {"/proc/sys/kernel/random/boot_id": "0b33\n"}
    monkeypatch.setattr(facts.platform, "system", lambda: "Linux")
    monkeypatch.setattr(facts, "_text", lambda path: read.get(path, ""))
    assert facts.machine_id() == f"0b33/{os.getuid()}"


def test_tool_is_started_without_a_fork_of_a_process_that_may_be_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawn, started = os.posix_spawn, []

    def recorded(path: str, *arguments: Any, **options: Any) -> int:
        started.append(Path(path).name)
        return spawn(path, *arguments, **options)

    monkeypatch.setattr(os, "posix_spawn", recorded)
    assert facts.tool_output("echo", "-g") == "-g\n"
    assert started == ["echo"]
