"""Kernels in cases that functions of whole arrays do not single out."""

from __future__ import annotations

import numpy as np

from mlxtune.backend.cpu import numba_kernels


def test_masked_entries_have_no_weight() -> None:
    """Tiny weights would be subnormal numbers, which make products ten times as slow."""
    lowest = np.finfo(np.float32).min
    scores = np.array([[0, 1, -60, -200, lowest]] * 2, np.float32)
    numba_kernels.softmax_(0, 1, scores, 1, False)
    numba_kernels.softmax_gradient_(1, 2, scores, np.ones_like(scores), 1, False)
    expected = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
    for row in scores:
        np.testing.assert_allclose(row[:2], expected, rtol=1e-6)
        assert (row[2:] == 0).all()
    logits, total = np.array([[0, -200]], np.float32), np.zeros(1, np.float32)
    highest = np.full(1, -np.inf, np.float32)
    numba_kernels.online_softmax_(0, 1, logits, highest, total, np.zeros(1, np.float32))
    assert logits.tolist() == [[1, 0]]
