"""What tests share: where the real material is, when it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real tokenizers, chat data and models beside the repository."""
    if not SHARED.is_dir():
        pytest.skip("needs the real material in ../shared, which is not part of the project")
    return SHARED
