"""Mamba 2's recurrence with what the products of pairs of tokens are weighed by, by kernels."""

from functools import partial

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import recurrences
from mlxtune.backend.cpu.arrays import Floats, by_rows, empty, matrix, view
from mlxtune.backend.cpu.layers import product
from mlxtune.backend.mixers import state_space


def _weigh(pairs: mx.array, sums: mx.array) -> mx.array:
    made = empty(*sums.shape[1:], sums.shape[-1])
    by_rows(recurrences.weigh, _matrices(made), _sums(sums), _matrices(pairs))
    return made


def _weigh_back(
    pairs: mx.array, sums: mx.array, d_weights: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    made = empty(*d_weights.shape), empty(*pairs.shape), empty(*sums.shape[1:])
    weights, d_pairs, d_decays = _matrices(made[0]), _matrices(made[1]), matrix(made[2])
    given = _sums(sums), _matrices(pairs), _matrices(d_weights)
    by_rows(recurrences.weigh_back, weights, *given, d_pairs, d_decays, rows=len(d_pairs))
    return made


def _sums(x: mx.array) -> Floats:
    return np.ascontiguousarray(view(x)).reshape(2, -1, x.shape[-1])


def _matrices(x: mx.array) -> Floats:
    return np.ascontiguousarray(view(x)).reshape(-1, *x.shape[-2:])


ssm_update = partial(
    state_space.ssm_update, kernels=state_space.Kernels(_weigh, _weigh_back, product)
)
