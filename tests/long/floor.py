"""The matrix products that a step needs, and the time they take alone.

The ratio of their time to the step's time is the step's efficiency. The count is a lower bound:
real tokens only, no padding, and each product once.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from timeit import repeat, timeit
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.forward.layer_calls import first_trained
from mlxtune.backend.lora.targets import experts_per_token, projections
from mlxtune.backend.models.mixers.gated_delta import SIZE as CHUNK

# Attributes with the number of attention heads, and with a recurrence's heads and state sizes.
_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_RECURRENT = ("num_v_heads", "head_k_dim", "head_v_dim")
# A product is repeated until a sample lasts this long.
_SAMPLE_S, _SAMPLES, _MAX_REPEATS = 0.1, 3, 64
# More entries than any cache holds.
_BEYOND_CACHES, _MAX_COPIES = 1 << 25, 64
# Larger products are timed on fewer rows.
_MAX_FLOPS_CPU, _MAX_FLOPS_GPU = 6e10, 4e12


@dataclass(frozen=True)
class Matmul:
    """A matrix product of shapes (batch, m, k) and (batch, k, n), for one kind of work."""

    kind: str
    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """The number of multiplications and additions."""
        return 2 * self.batch * self.m * self.k * self.n


# The count of each product. It may be a fraction: tokens are rounded to the nearest of few sizes,
# and causal attention needs half of a square.
Matmuls = Mapping[Matmul, float]


def step_matmuls(
    model: nn.Module,
    stretches: Sequence[tuple[int, int]],
    supervised: int,
    *,
    vocab_size: int,
    hidden_size: int,
) -> Matmuls:
    """Return the products of one step on a model with LoRA.

    A stretch is a run of consecutive real tokens: a whole example, a shared prefix, or the rest of
    an example after its prefix. `stretches` gives each stretch's length and the length of its
    prefix. `supervised` is the number of tokens with loss. For T tokens, these are counted:
    - projections: (T, in, out) forward; (T, out, in) for the gradient of the inputs in the layers
      above the first with LoRA. Frozen weights need no gradient. If that first layer has LoRA on
      its attention, its projections after the attention are counted too.
    - LoRA: two products forward, two for its own gradients, two for the gradient of the inputs.
    - attention, by stretch and head: scores and values forward, and four products backward.
      Causal attention needs n (n + 1) / 2 of n² pairs, fewer in a sliding window.
    - gated delta rule, by stretch and head: the products of its chunks, twice as many backward.
    - head: (supervised, hidden, vocabulary) forward, and for the gradient of the hidden states.
    - experts: like projections and LoRA, one product per expert, with tokens divided evenly.

    Attention and recurrences of unknown shape are left out.
    """
    counts: defaultdict[Matmul, float] = defaultdict(float)
    layers = list(model.layers)
    first = first_trained(layers)
    args = getattr(getattr(model, "language_model", model), "args", None)
    options = getattr(args, "__dict__", {})
    window, sent = options.get("sliding_window"), experts_per_token(options) or 1
    size, share = _rounded(sum(tokens for tokens, _ in stretches))
    for i, layer in enumerate(layers):
        for matmul, part in _projections(layer, size, sent, above=i > first, first=i == first):
            counts[matmul] += share * part
        mixed = [*_attention(layer, stretches, window), *_recurrence(layer, stretches)]
        for matmul, count in mixed:
            counts[matmul] += count * (3 if i > first else 1)
    size, share = _rounded(supervised)
    counts[Matmul("head", size, hidden_size, vocab_size)] += share
    counts[Matmul("head", size, vocab_size, hidden_size)] += share
    return counts


def needed_flops(matmuls: Matmuls) -> int:
    """Count the multiplications and additions in products, except in attention and recurrences."""
    across = ("attention", "recurrence")
    return round(sum(n * each.flops for each, n in matmuls.items() if each.kind not in across))


def _projections(
    layer: nn.Module, size: int, sent: int, *, above: bool, first: bool
) -> Iterator[tuple[Matmul, float]]:
    """Yield the products of projections and LoRA; each token goes to `sent` experts."""
    adapted = {name: module for name, module in layer.named_modules() if "lora_a" in module}
    attention = tuple({name.rpartition(".")[0] for name in adapted if "att" in name})
    for name, module in projections(layer).items():
        kind, experts, rows, share = _rows(module.weight, size, sent, "projections")
        inner, outer = _dims(module)
        yield Matmul(kind, rows, inner, outer, experts), share
        if above or (first and attention and not name.startswith(attention)):
            yield Matmul(kind, rows, outer, inner, experts), share
    for module in adapted.values():
        kind, experts, rows, share = _rows(module.lora_a, size, sent, "LoRA")
        inner, rank = module.lora_a.shape[-2:]
        outer = module.lora_b.shape[1]
        if module.lora_a.ndim == 3:  # of experts, transposed
            inner, rank = rank, inner
        shapes = [(rows, inner, rank), (rows, rank, outer), (rank, rows, outer)]
        shapes += [(rows, outer, rank), (inner, rows, rank)]
        if above:
            shapes.append((rows, rank, inner))
        for m, k, n in shapes:
            yield Matmul(kind, m, k, n, experts), share


def _rows(weight: mx.array, size: int, sent: int, kind: str) -> tuple[str, int, int, float]:
    """Return the kind of a matrix's products, their number, their rows, and the share that counts.

    A stack of experts has one product per expert, but at most one per token and chosen expert.
    """
    if weight.ndim < 3:
        return kind, 1, size, 1.0
    experts = min(weight.shape[0], size * sent)
    rows = round(size * sent / experts)
    return "experts", experts, rows, size * sent / (experts * rows)


def _attention(
    layer: nn.Module, stretches: Sequence[tuple[int, int]], window: Any
) -> Iterator[tuple[Matmul, float]]:
    """Yield the products of attention's forward pass."""
    for _, module in layer.named_modules():
        heads = next((getattr(module, name) for name in _HEADS if hasattr(module, name)), None)
        query = getattr(module, "q_proj", None)
        if not isinstance(heads, int) or query is None:
            continue
        # Some query projections also return a gate.
        whole = _dims(getattr(query, "linear", query))[1] // heads
        width = getattr(module, "head_dim", whole)
        for tokens, before in stretches:
            queries, keys = _rounded(tokens)[0], _rounded(before + tokens)[0]
            pairs = tokens * before + tokens * (tokens + 1) / 2
            if isinstance(window, int) and window > 0:
                pairs = min(pairs, tokens * window)
            count = pairs / (queries * keys)
            yield Matmul("attention", queries, width, keys, heads), count
            yield Matmul("attention", queries, keys, width, heads), count
        return


def _recurrence(
    layer: nn.Module, stretches: Sequence[tuple[int, int]]
) -> Iterator[tuple[Matmul, float]]:
    """Yield the products of a gated delta rule's forward pass; see mixers/gated_delta.py."""
    for _, module in layer.named_modules():
        heads, keys, values = (getattr(module, name, None) for name in _RECURRENT)
        if not (isinstance(heads, int) and isinstance(keys, int) and isinstance(values, int)):
            continue
        for tokens, before in stretches:
            size = min(tokens, CHUNK)
            chunks = tokens / size
            # Products of keys with keys and with queries, and the chunk's updates and reads within
            # itself. The mask removes half of each square.
            for columns in (keys, values):
                yield Matmul("recurrence", size, columns, size, heads), chunks
            # Reads of the state by keys and queries, and updates of the state.
            read = chunks if before else chunks - 1
            yield Matmul("recurrence", size, keys, values, heads), 2 * read
            yield Matmul("recurrence", keys, size, values, heads), chunks - 1
        return


def _dims(linear: nn.Module) -> tuple[int, int]:
    outer, inner = linear.weight.shape[-2:]
    return (inner * 32 // linear.bits if "scales" in linear else inner), outer


def _rounded(tokens: int) -> tuple[int, float]:
    """Return the nearest of four sizes per octave, and the ratio of `tokens` to that size."""
    if tokens < 8:
        return max(tokens, 1), float(tokens > 0)
    unit = 2 ** (int(math.log2(tokens)) - 2)
    size = round(tokens / unit) * unit
    return size, tokens / size


def matmul_seconds(matmuls: Matmuls, dtype: str) -> dict[str, float]:
    """Return the seconds of products, by kind, at the speed of the device's fastest products.

    On the CPU, the faster of MLX and numpy counts; numpy multiplies in float32, whatever the dtype.
    """
    largest = _MAX_FLOPS_CPU if on_cpu() else _MAX_FLOPS_GPU
    spent: defaultdict[str, float] = defaultdict(float)
    for matmul, count in matmuls.items():
        rows = max(1, int(matmul.m * min(1.0, largest / matmul.flops)))
        seconds = _seconds(matmul.batch, rows, matmul.k, matmul.n, dtype)
        spent[matmul.kind] += count * seconds * matmul.m / rows
    return dict(spent)


@cache
def _seconds(batch: int, m: int, k: int, n: int, dtype: str) -> float:
    """Return the seconds of one product.

    Each repetition has a different second matrix, so that the matrix comes from memory and not from
    a cache, like a step's weights.
    """
    copies = min(-(-_BEYOND_CACHES // (batch * k * n)), _MAX_COPIES)
    random = np.random.default_rng(0)
    shapes = [(batch, m, k), *[(batch, k, n)] * copies]
    a, *b = (random.random(shape, dtype=np.float32) for shape in shapes)
    mlx_a, *mlx_b = (mx.array(each).astype(getattr(mx, dtype)) for each in (a, *b))
    out = np.empty((batch, m, n), dtype=np.float32)

    def by_mlx(times: int) -> None:
        mx.eval([mlx_a @ mlx_b[i % copies] for i in range(times)])

    def by_numpy(times: int) -> None:
        for i in range(times):
            np.matmul(a, b[i % copies], out=out)

    mx.eval(mlx_a, mlx_b)
    fastest = min(map(_time, [by_mlx, by_numpy] if on_cpu() else [by_mlx]))
    mx.clear_cache()
    return fastest


def _time(run: Callable[[int], None]) -> float:
    """Return the time of one iteration in the fastest sample; `run(n)` runs n iterations.

    Other users of the device can only increase this time, and with it the claimed efficiency.
    """
    run(1)
    once = timeit(lambda: run(1), number=1)
    repeats = min(max(math.ceil(_SAMPLE_S / once), 1), _MAX_REPEATS)
    return min(repeat(lambda: run(repeats), number=1, repeat=_SAMPLES)) / repeats
