"""Skips this folder's test modules if numba, which they import, is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from tests.backend.kernels import REASON


class _Skipped(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Replace a module with a skipped one if numba is missing."""
    if find_spec("numba") is not None:
        return None
    return _Skipped.from_parent(parent, path=module_path)
