"""Memory limits and the relief of memory pressure, with a fake device's answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxtune.backend.device import allocator
from mlxtune.backend.device.device_helper import device_facts
from mlxtune.core.machine.reservation import Reservation
from mlxtune.core.steps.memory_in_flight import GraphLimits

SIZE = 50_000_000


@pytest.fixture(autouse=True)
def restore_limits() -> Iterator[None]:
    limit = mx.get_memory_limit()
    cache = mx.set_cache_limit(0)
    yield
    mx.set_memory_limit(limit)
    mx.set_cache_limit(cache)


def test_limit_is_in_decimal_gb() -> None:
    limits = allocator.set_limits(2.5)
    assert limits.memory == mx.get_memory_limit() == 2_500_000_000
    assert mx.set_cache_limit(0) == limits.cache


@pytest.mark.parametrize("cpu", [True, False])
def test_cache_is_for_devices_whose_allocator_keeps_none(
    cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "on_cpu", lambda: cpu)
    limits = allocator.find_limits(4)
    assert limits.cache == (0 if cpu else 500_000_000)
    assert ("cache 500 MB" in limits.describe()) == (not cpu)
    assert ("no Metal" in limits.describe()) == cpu


def test_limit_is_capped_at_the_recommended_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"max_recommended_working_set_size": 17_000_000_000, "device_name": "Apple M3"}
    monkeypatch.setattr(allocator.mx, "device_info", lambda: info)
    limits = allocator.set_limits(24)
    assert limits.memory == mx.get_memory_limit() == 17_000_000_000
    assert "limit 17 GB" in limits.describe()
    assert "Apple M3" in limits.describe()
    assert "limit 20 MB" in allocator.find_limits(0.02).describe()
    assert allocator.set_limits(8).memory == 8_000_000_000


METAL = {"max_recommended_working_set_size": 48_000_000_000, "memory_size": 64_000_000_000}
CUDA = {"total_memory": 16_000_000_000, "free_memory": 15_500_000_000}
CPU = {"device_name": "AMD EPYC", "architecture": "x86_64"}


@pytest.mark.parametrize(
    ("info", "recommended", "shared"),
    [(METAL, 48_000_000_000, 48_000_000_000), (CUDA, 14_400_000_000, 14_400_000_000)],
    ids=["Metal", "CUDA"],
)
def test_device_gives_less_than_it_has(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, int], recommended: int, shared: int
) -> None:
    monkeypatch.setattr(allocator.mx, "device_info", lambda: info)
    assert allocator.find_limits(24).memory == min(24_000_000_000, recommended)
    assert allocator.find_limits(24).recommended == recommended
    assert allocator.find_limits(1000).memory == recommended
    assert allocator.capacity() == shared
    facts = device_facts()
    assert (facts.recommended, facts.limit, facts.capacity) == (
        recommended,
        min(24_000_000_000, recommended),
        shared,
    )


def test_cpu_caps_no_limit_and_shares_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.mx, "device_info", lambda: CPU)
    limits = allocator.find_limits(24)
    assert (limits.memory, limits.recommended) == (24_000_000_000, None)
    assert allocator.capacity() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_that_other_programs_hold_is_not_planned_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = CUDA | {"free_memory": 5_000_000_000}
    monkeypatch.setattr(allocator.mx, "device_info", lambda: info)
    monkeypatch.setattr(allocator.mx, "get_active_memory", lambda: 2_000_000_000)
    monkeypatch.setattr(allocator.mx, "get_cache_memory", lambda: 1_000_000_000)
    assert allocator.find_limits(24).memory == 8_000_000_000
    # Memory of other mlxtune runs counts as free, because their reservations already make this run
    # wait or fail.
    ours = Reservation(os.getpid(), 9_000_000_000, "this run")
    other = Reservation(1, 3_000_000_000, "another run")
    monkeypatch.setattr(allocator, "reservations", lambda folder: [ours, other])
    assert allocator.find_limits(24).memory == 11_000_000_000
    assert allocator.capacity() == 14_400_000_000


@pytest.mark.parametrize(
    ("architecture", "operations", "read"),
    [("sm_80", 20, 400), ("sm_90", 100, 1000), ("sm_121", 20, 25), ("sm_89", 20, 100)],
)
def test_graphs_of_a_cuda_device_end_where_mlx_ends_them(
    architecture: str, operations: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = CUDA | {"architecture": architecture}
    monkeypatch.setattr(allocator.mx, "device_info", lambda: info)
    names = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert allocator.graph_limits() == GraphLimits(operations, read * 2**20)
    for name, text in zip(names, ("7", "9 MB"), strict=True):
        monkeypatch.setenv(name, text)
    assert allocator.graph_limits() == GraphLimits(7, 9 * 2**20)


@pytest.mark.parametrize("info", [METAL, CPU], ids=["Metal", "CPU"])
def test_graphs_are_queued_on_cuda_only(
    info: dict[str, str | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator.mx, "device_info", lambda: info)
    assert allocator.graph_limits() is None


def test_wired_limit_is_set_on_metal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[int] = []
    monkeypatch.setattr(allocator.mx, "set_wired_limit", wired.append)
    monkeypatch.setattr(allocator.mx.metal, "is_available", lambda: False)
    allocator.set_limits(4)
    monkeypatch.setattr(allocator.mx.metal, "is_available", lambda: True)
    mac = {"device_name": "Apple M1", "max_recommended_working_set_size": 5_000_000_000}
    monkeypatch.setattr(allocator.mx, "device_info", lambda: mac)
    for limit in (4, 24):
        allocator.set_limits(limit)
    assert wired == [4_000_000_000, 4_500_000_000], "a tenth is left to other programs"


@pytest.mark.parametrize(
    ("active", "cached", "cleared"), [(80, 20, 1), (80, 5, 0), (95, 0, 0), (10, 85, 1)]
)
def test_cache_is_cleared_under_pressure_only(
    monkeypatch: pytest.MonkeyPatch, active: int, cached: int, cleared: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(allocator.mx, "get_memory_limit", lambda: 100)
    monkeypatch.setattr(allocator.mx, "get_active_memory", lambda: active)
    monkeypatch.setattr(allocator.mx, "get_cache_memory", lambda: cached)
    monkeypatch.setattr(allocator.mx, "clear_cache", lambda: calls.append(None))
    allocator.clear_cache_near_limit()
    assert len(calls) == cleared


def test_peak_stays_the_highest_after_a_reset() -> None:
    allocator.set_limits(2)
    mx.eval(mx.zeros(3_000_000))
    # A GPU frees an array only once it has reported its work as done.
    mx.synchronize()
    highest = allocator.peak_bytes()
    mx.synchronize()  # frees the zeros on CUDA
    allocator.start_peak()
    mx.eval(mx.zeros(1_000_000))
    assert allocator.last_peak_bytes() < highest - 4_000_000
    assert allocator.peak_bytes() == highest


def test_only_memory_used_since_the_start_is_judged() -> None:
    allocator.set_limits((mx.get_active_memory() + 10_000_000) / allocator.GB)
    mx.eval(mx.zeros(3_000_000))
    assert allocator.last_peak_bytes() > mx.get_memory_limit()
    allocator.start_peak()
    assert allocator.last_peak_bytes() <= mx.get_memory_limit()


# Peaks


def use() -> None:
    mx.eval(mx.ones(SIZE // 4) + 1)


def test_peak_counts_since_the_reset() -> None:
    use()
    allocator.reset_peaks()
    before = allocator.peak_bytes()
    use()
    assert before + SIZE <= allocator.peak_bytes() < before + 3 * SIZE
    allocator.reset_peaks()
    assert allocator.peak_bytes() < before + SIZE


def test_peak_is_kept_when_a_step_resets_it() -> None:
    allocator.reset_peaks()
    use()
    peak = allocator.peak_bytes()
    allocator.start_peak()
    assert allocator.peak_bytes() == peak


def test_held_memory_counts_without_a_new_allocation() -> None:
    held = mx.ones(SIZE // 4)
    mx.eval(held)
    allocator.reset_peaks()
    assert allocator.peak_bytes() >= SIZE
    del held


def test_peak_of_the_process_counts_what_mlx_does_not() -> None:
    # The code runs in a separate process, because this process's peak is already higher.
    code = (
        "import numpy as np\n"
        "from mlxtune.backend.device import allocator\n"
        "before = allocator.peak_rss()\n"
        "held = np.ones(2 * before // 8)\n"
        "assert allocator.peak_rss() >= before + held.nbytes // 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_peak_of_the_process_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = allocator.peak_rss()
    monkeypatch.setattr(allocator, "read_kernel_file", missing)
    assert 0.5 < allocator.peak_rss() / ours < 2


def missing(path: Path) -> str:
    raise FileNotFoundError(path)
