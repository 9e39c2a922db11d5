"""Inverses of triangular matrices, against those of numpy in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.models.mixers.triangular import unit_inverse
from tests.backend.cpu.compared import assert_close, random


@pytest.mark.parametrize("size", [1, 2, 4, 8, 64])
def test_inverse_of_a_batch(size: int) -> None:
    a = mx.tri(size, size, -1) * random(3, 2, size, size, scale=0.2)
    assert_close(unit_inverse(a), np.linalg.inv(np.eye(size) + np.array(a, np.float64)), 1e-6)


def test_inverse_for_equal_keys_is_exact() -> None:
    """Its entries are 0 and 1, where powers of the matrix reach binomials of 63."""
    size = 64
    found = unit_inverse(mx.tri(size, size, -1))
    assert mx.array_equal(found, mx.eye(size) - mx.eye(size, k=-1))
