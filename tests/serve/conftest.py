"""A server of three adapters of the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.serve.served import server_of, write_adapter

if TYPE_CHECKING:
    from mlxtune.serve.api_server import ApiServer


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"run-{seed}", seed) for seed in range(3)]


@pytest.fixture(scope="module")
def server(adapters: list[Path]) -> Iterator[ApiServer]:
    with server_of(*adapters) as server:
        yield server
