"""Parsing the output of a system's tools, with texts from real machines."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxtune.core.machine import facts
from mlxtune.core.machine.facts import Memory


def test_mac_readings_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("machdep.cpu.brand_string: Apple M2: Pro", "", "sysctl.proc_translated: 1")
    output = "\n".join([*values, "iogpu.wired_limit_mb: 0"])
    monkeypatch.setattr(facts, "tool_output", lambda *_: output)
    monkeypatch.setattr(facts, "read_memory", lambda: Memory(2**34, 2**33, 2**20))
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.3", ("", "", ""), "arm64"))
    assert facts.read_system() == {
        **{"name": "macOS", "release": "15.3", "chip": "Apple M2: Pro", "translated": True},
        "memory": Memory(2**34, 2**33, 2**20),
        "wired_limit_mb": 0,
    }


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="compares with /proc/meminfo")
def test_memory_matches_the_system() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    found = facts.read_memory()
    assert found.total == sizes["MemTotal"]
    assert found.available == pytest.approx(sizes["MemAvailable"], rel=0.2)
    assert found.swap_used == pytest.approx(sizes["SwapTotal"] - sizes["SwapFree"], abs=2**28)


@pytest.mark.parametrize(
    ("limit", "total", "available"),
    [(2**52, 100, 80), (90, 90, 80), (50, 50, 50)],
)
def test_container_has_no_more_memory_than_its_limit(
    monkeypatch: pytest.MonkeyPatch, limit: int, total: int, available: int
) -> None:
    memory = SimpleNamespace(total=100, available=80)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(used=7))
    assert facts.read_memory(limit) == Memory(total, available, 7)


def test_memory_is_unknown_if_the_system_does_not_report_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> Any:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr("psutil.virtual_memory", fails)
    assert facts.read_memory() == Memory()


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


def test_linux_machine_is_identified_by_its_boot(monkeypatch: pytest.MonkeyPatch) -> None:
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
