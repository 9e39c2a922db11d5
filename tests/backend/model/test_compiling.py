"""Compiled functions count their signatures."""

from __future__ import annotations

import mlx.core as mx

from mlxtune.backend.model.compiling import compiled, traces


def test_each_shape_is_traced_once() -> None:
    state = {"offset": mx.array(1.0)}
    add = compiled(lambda x, scale=1: x * scale + state["offset"], inputs=state)
    before = traces()
    for width in (2, 3, 2, 3):
        add(mx.ones(width))
    assert traces() - before == 2
    add(mx.ones(2), scale=2)
    assert traces() - before == 3
