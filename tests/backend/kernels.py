"""The CPU's kernels, for tests that are partly skipped without numba, as on a Mac."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import pytest

REASON = "needs numba, which the extra cpu brings on Linux alone"


class _Absent:
    """Replaces a kernel module; its functions skip the calling test."""

    def __getattr__(self, name: str) -> Any:
        def skip(*_: Any, **options: Any) -> NoReturn:
            pytest.skip(REASON)

        return skip


def kernel_module(name: str) -> Any:
    """Return a module of mlxtune.backend.cpu, or an `_Absent` if numba is missing."""
    try:
        return importlib.import_module(f"mlxtune.backend.cpu.{name}")
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return _Absent()
