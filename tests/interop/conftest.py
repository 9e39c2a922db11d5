"""What tests with other tools share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the proofs on the way out look at fewer tokens; what is proved here is proved here."""
    from mlxtune.backend import proof

    monkeypatch.setattr(proof, "NEW_TOKENS", 8)
