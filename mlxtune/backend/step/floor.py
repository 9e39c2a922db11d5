"""The matrix products that a step needs, and how long they take by themselves.

Their time over that of the step is the step's efficiency. What is counted is a floor: real tokens
only, no padding, no product that is computed twice.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxtune.backend.lora.targets import projections
from mlxtune.backend.model.device import on_cpu

# A sample of a product lasts so long, by repeating it.
_SAMPLE_S, _SAMPLES, _MOST_REPEATS = 0.1, 3, 64
# Entries that no cache holds.
_BEYOND_CACHES, _MOST_COPIES = 1 << 25, 64
# Larger products are timed on fewer rows.
_LARGEST_FLOPS_CPU, _LARGEST_FLOPS_GPU = 6e10, 4e12


@dataclass(frozen=True)
class Product:
    """The product of matrices (batch, m, k) and (batch, k, n), of one kind of work."""

    kind: str
    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.k * self.n


# How often each product is needed. A fraction: tokens are rounded to few sizes, which are then
# measured instead, and a causal square is half a square.
Products = Mapping[Product, float]


@dataclass(frozen=True)
class StepTokens:
    """The real tokens of a step.

    `stretches` are tokens that run one after the other, with how many tokens stand before them
    that ran apart: an example, or the prefix of several, or what of an example follows it.
    `supervised` is how many tokens carry loss.
    """

    stretches: Sequence[tuple[int, int]]
    supervised: int

    @property
    def run(self) -> int:
        """How many tokens run."""
        return sum(tokens for tokens, _ in self.stretches)


def step_products(
    model: nn.Module, tokens: StepTokens, *, vocab_size: int, hidden_size: int
) -> Products:
    """Return the products of one step on a model with LoRA.

    Counted, for T tokens:
    - projections: (T, in, out) forward, and for the gradient of the inputs (T, out, in) in the
      layers above the first with LoRA. Frozen weights need no gradient. In that first layer only
      what comes after the attention is counted, if LoRA is on the attention, else nothing.
    - LoRA: its two products forward, two for its own gradients, two for those of the inputs.
    - attention, by stretch and head: scores and values forward, and four products backward; of
      each what causal attention needs, n (n + 1) / 2 pairs of n², less in a sliding window.
    - head: (supervised, hidden, vocabulary) forward, and for the gradient of the hidden states.

    Experts, and attention of unknown shape, are left out.
    """
    counts: defaultdict[Product, float] = defaultdict(float)
    layers = list(model.layers)
    trained = [i for i, layer in enumerate(layers) if any(_lora(layer))]
    window = getattr(getattr(model, "args", None), "sliding_window", None)
    for i, layer in enumerate(layers):
        above = i > trained[0]
        for product, count in _layer(layer, tokens.run, first=i == trained[0], above=above):
            counts[product] += count
        if heads := _heads(layer):
            for product, count in _attention(*heads, tokens, window, 3 if above else 1):
                counts[product] += count
    size, share = _rounded(tokens.supervised)
    counts[Product("head", size, hidden_size, vocab_size)] += share
    counts[Product("head", size, vocab_size, hidden_size)] += share
    return counts


def _layer(
    layer: nn.Module, tokens: int, *, first: bool, above: bool
) -> Iterator[tuple[Product, float]]:
    size, share = _rounded(tokens)
    adapted = {name.rpartition(".")[0] for name, _ in _named_lora(layer)}
    attention = {path for path in adapted if "attn" in path or "attention" in path}
    for name, module in projections(layer).items():
        if module.weight.ndim != 2:
            continue
        inner, outer = _dims(module)
        yield Product("projections", size, inner, outer), share
        after = bool(attention) and not any(name.startswith(path) for path in attention)
        if above or (first and after):
            yield Product("projections", size, outer, inner), share
    for inner, rank, outer in _lora(layer):
        yield Product("LoRA", size, inner, rank), share
        yield Product("LoRA", size, rank, outer), share
        yield Product("LoRA", rank, size, outer), share
        yield Product("LoRA", size, outer, rank), share
        yield Product("LoRA", inner, size, rank), share
        if above:
            yield Product("LoRA", size, rank, inner), share


def _attention(
    heads: int, width: int, tokens: StepTokens, window: int | None, passes: int
) -> Iterator[tuple[Product, float]]:
    for n, before in tokens.stretches:
        queries, keys = _rounded(n)[0], _rounded(before + n)[0]
        pairs = n * before + n * (n + 1) / 2
        if isinstance(window, int) and window > 0:
            pairs = min(pairs, n * window)
        count = passes * pairs / (queries * keys)
        yield Product("attention", queries, width, keys, heads), count
        yield Product("attention", queries, keys, width, heads), count


def _named_lora(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in layer.named_modules()
        if "lora_a" in module and module.lora_a.ndim == 2
    ]


def _lora(layer: nn.Module) -> Iterator[tuple[int, int, int]]:
    for _, module in _named_lora(layer):
        inner, rank = module.lora_a.shape
        yield inner, rank, module.lora_b.shape[1]


def _dims(linear: nn.Module) -> tuple[int, int]:
    outer, inner = linear.weight.shape
    return (inner * 32 // linear.bits if "scales" in linear else inner), outer


def _heads(layer: nn.Module) -> tuple[int, int] | None:
    """Return how many query heads the attention of a layer has, and their width."""
    for _, module in layer.named_modules():
        heads = getattr(module, "n_heads", None) or getattr(module, "num_heads", None)
        query = getattr(module, "q_proj", None)
        if isinstance(heads, int) and query is not None:
            return heads, _dims(getattr(query, "linear", query))[1] // heads
    return None


def _rounded(tokens: int) -> tuple[int, float]:
    """Return the nearest of four sizes an octave, and what share of it the tokens are."""
    if tokens < 8:
        return max(tokens, 1), float(tokens > 0)
    unit = 2 ** (int(math.log2(tokens)) - 2)
    size = round(tokens / unit) * unit
    return size, tokens / size


class ProductTimer:
    """Times products as the fastest plain product that the device has, each shape once.

    On the CPU that is MLX's or numpy's, the latter in float32 whatever the dtype. The second matrix
    is another one each time, as the weights of a step are: out of memory, not out of a cache.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = getattr(mx, dtype)
        self._seconds: dict[tuple[int, int, int, int], float] = {}

    def seconds(self, products: Products) -> dict[str, float]:
        """Return the seconds that products take, by kind."""
        spent: dict[str, float] = {}
        for product, count in products.items():
            spent[product.kind] = spent.get(product.kind, 0.0) + count * self._one(product)
        return spent

    def _one(self, product: Product) -> float:
        largest = _LARGEST_FLOPS_CPU if on_cpu() else _LARGEST_FLOPS_GPU
        rows = max(1, int(product.m * min(1.0, largest / product.flops)))
        shape = (product.batch, rows, product.k, product.n)
        if shape not in self._seconds:
            runs = [self._mlx(*shape), *([_numpy(*shape)] if on_cpu() else [])]
            self._seconds[shape] = min(map(_time, runs))
            mx.clear_cache()
        return self._seconds[shape] * product.m / rows

    def _mlx(self, batch: int, m: int, k: int, n: int) -> Callable[[int], Any]:
        a = mx.random.uniform(-1, 1, (batch, m, k)).astype(self._dtype)
        each = _copies(batch * k * n)
        b = [mx.random.uniform(-1, 1, (batch, k, n)).astype(self._dtype) for _ in range(each)]
        mx.eval(a, b)
        return lambda times: mx.eval([a @ b[i % each] for i in range(times)])


def _numpy(batch: int, m: int, k: int, n: int) -> Callable[[int], Any]:
    random = np.random.default_rng(0)
    a = random.random((batch, m, k), dtype=np.float32)
    each = _copies(batch * k * n)
    b = [random.random((batch, k, n), dtype=np.float32) for _ in range(each)]
    out = np.empty((batch, m, n), dtype=np.float32)
    return lambda times: [np.matmul(a, b[i % each], out=out) for i in range(times)]


def _copies(entries: int) -> int:
    """Return how many matrices of so many entries no cache holds, within reason."""
    return min(-(-_BEYOND_CACHES // entries), _MOST_COPIES)


def _time(run: Callable[[int], Any]) -> float:
    """Return the seconds of one time of what `run` does so many times, in the best of samples.

    Others who use the device can only lengthen it, and with it the efficiency that is claimed.
    """
    run(1)
    once = _seconds(run, 1)
    repeats = min(max(math.ceil(_SAMPLE_S / once), 1), _MOST_REPEATS)
    return min(_seconds(run, repeats) / repeats for _ in range(_SAMPLES))


def _seconds(run: Callable[[int], Any], times: int) -> float:
    started = time.perf_counter()
    run(times)
    return time.perf_counter() - started
