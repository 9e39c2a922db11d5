"""Memory limits and the relief of pressure, with the device's answers put in."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlxtune.backend import memory


@pytest.fixture(autouse=True)
def restore_limits() -> Iterator[None]:
    limit = mx.get_memory_limit()
    cache = mx.set_cache_limit(0)
    yield
    mx.set_memory_limit(limit)
    mx.set_cache_limit(cache)


def test_limit_is_what_was_asked_for_in_decimal_gb() -> None:
    limits = memory.set_limits(2.5)
    assert limits.memory == mx.get_memory_limit() == 2_500_000_000
    assert 0 < limits.cache < limits.memory
    assert mx.set_cache_limit(0) == limits.cache


def test_limit_is_capped_at_what_the_device_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"max_recommended_working_set_size": 17_000_000_000, "device_name": "Apple M3"}
    monkeypatch.setattr(memory.mx, "device_info", lambda: info)
    limits = memory.set_limits(24)
    assert limits.memory == mx.get_memory_limit() == 17_000_000_000
    assert "limit 17.0 GB" in limits.describe()
    assert "Apple M3" in limits.describe()
    assert memory.set_limits(8).memory == 8_000_000_000


def test_wired_limit_is_set_on_metal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[int] = []
    monkeypatch.setattr(memory.mx, "set_wired_limit", wired.append)
    memory.set_limits(4)
    monkeypatch.setattr(memory.mx.metal, "is_available", lambda: True)
    memory.set_limits(4)
    assert wired == [4_000_000_000]


@pytest.mark.parametrize(
    ("active", "cached", "cleared"), [(80, 20, 1), (80, 5, 0), (95, 0, 0), (10, 85, 1)]
)
def test_cache_is_cleared_under_pressure_only(
    monkeypatch: pytest.MonkeyPatch, active: int, cached: int, cleared: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(memory.mx, "get_memory_limit", lambda: 100)
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: active)
    monkeypatch.setattr(memory.mx, "get_cache_memory", lambda: cached)
    monkeypatch.setattr(memory.mx, "clear_cache", lambda: calls.append(None))
    memory.relieve_pressure()
    assert len(calls) == cleared


def test_micro_batches_shrink_with_the_limit_and_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "on_cpu", lambda: False)

    def tokens(gb: float, vocab_size: int) -> int:
        memory.set_limits(gb)
        return memory.micro_batch_tokens(vocab_size=vocab_size, hidden_size=1024, num_layers=28)

    assert tokens(24, 151_936) < tokens(48, 151_936)
    assert tokens(24, 151_936) < tokens(24, 32_000)
    assert tokens(0.001, 151_936) == 1
