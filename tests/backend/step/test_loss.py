"""The reference for masked cross-entropy, against its formula."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.step.loss import cross_entropies


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_loss_of_half_precision_logits_is_computed_in_float32(dtype: mx.Dtype) -> None:
    logits = (mx.random.normal((1, 4, 1000), key=mx.random.key(3)) * 8).astype(dtype)
    targets = mx.array([[1, 20, 300, 999]])

    found = cross_entropies(lambda inputs: logits, mx.zeros((1, 4), mx.int32), targets)

    exact = np.array(logits.astype(mx.float32), dtype=np.float64)[0]
    wanted = [
        np.log(np.exp(row - row.max()).sum()) + row.max() - row[target]
        for row, target in zip(exact, [1, 20, 300, 999], strict=True)
    ]
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found)[0], wanted, rtol=1e-5)
