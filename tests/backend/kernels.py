"""The CPU's kernels for tests that also run without numba, as on a Mac."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import pytest

REASON = "needs numba, which the extra cpu brings on Linux alone"


class _Absent:
    """Replaces a module; each of its functions skips the calling test."""

    def __getattr__(self, name: str) -> Any:
        def skip(*_: Any, **options: Any) -> NoReturn:
            pytest.skip(REASON)

        return skip


def kernel_module(name: str) -> Any:
    """Return a module of mlxtune.backend.cpu, or a stand-in that skips tests without numba."""
    try:
        return importlib.import_module(f"mlxtune.backend.cpu.{name}")
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return _Absent()
