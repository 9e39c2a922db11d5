"""Samples several answers to each prompt with mlx-lm's batch generator; the prompt runs once.

Each sample has random numbers of its own, so it does not depend on the samples beside it, as far as
the device's kernels compute a sequence of a batch like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.sample_utils import apply_top_p

from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.models.token_array import TokenArrays
from mlxtune.backend.text.generate import CheckedSampler, Sampling, in_batches
from mlxtune.core.objectives.policy import SampledAnswer, SampleRequest
from mlxtune.errors import MlxTuneError, ModelError

# The maximum numbers of samples that are generated together, and of prompt tokens in a pass.
_MAX_BATCH, _PREFILL_TOKENS = 64, 2048
# The number of copies of a sample's cache in memory while mlx-lm extends it, and the number of
# tokens by which it grows.
_COPIES, _GROWTH = 3, 256
# Measured peaks on the CPU: the number of copies of one layer's cache while it is extended, and of
# logits, in float32, while tokens are drawn.
_LAYER_COPIES, _LOGITS = 1.5, 6


def sample(
    model: nn.Module,
    requests: Sequence[SampleRequest],
    sampling: Sampling,
    stop_tokens: frozenset[int],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[SampledAnswer]:
    """Return a sampled answer for each request, in order; equal prompts run once.

    An answer ends with one of the tokens `stop_tokens`, or is cut at `sampling.max_new_tokens`.
    `on_progress` is called with the number of finished answers and the total. After a fault of the
    GPU, samples are drawn again, fewer at a time if that helps.

    Raises MemoryLimitError or GpuError if no retry helps, and ModelError if a logit is NaN, the
    model's embedding has no row for a token, or mlx-lm cannot batch the model's cache.
    """
    model.eval()
    ids = TokenArrays(model)
    order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt), i))

    def draw(batch: Sequence[int]) -> list[SampledAnswer]:
        return _draw(model, ids, [requests[i] for i in batch], sampling, stop_tokens)

    return in_batches(draw, order, _MAX_BATCH, on_progress)


@dataclass
class _Drawn:
    """A sample while it is drawn: its keys, one for each token, and what was drawn so far."""

    keys: Any
    tokens: list[int]
    logps: list[float]
    finished: bool = False


def _draw(
    model: nn.Module,
    ids: TokenArrays,
    requests: Sequence[SampleRequest],
    sampling: Sampling,
    stop_tokens: frozenset[int],
) -> list[SampledAnswer]:
    """Draw the requested samples together, or as many of them as fit in memory."""
    caches = _prefill(model, ids, requests)
    fitting = _fitting(caches, requests, sampling)
    requests, caches = requests[:fitting], caches[:fitting]
    samples = [_Drawn(each.keys(sampling.max_new_tokens), [], []) for each in requests]
    sampler = _KeyedSampler(samples, sampling)
    checked, count = CheckedSampler(sampler), len(samples)
    with closing(
        BatchGenerator(
            model,
            max_tokens=sampling.max_new_tokens,
            stop_tokens=[[token] for token in sorted(stop_tokens)],
            sampler=checked,
            # All samples start together, so that the sampler knows their order.
            prefill_batch_size=count,
            completion_batch_size=count,
        )
    ) as generator:
        try:
            uids = generator.insert([[each.prompt[-1]] for each in requests], caches=caches)
            del caches  # The batch has copies.
            drawn_of = dict(zip(uids, samples, strict=True))
            while responses := generator.next_generated():
                for response in responses:
                    one = drawn_of[response.uid]
                    one.tokens.append(int(response.token))
                    one.finished = response.finish_reason == "stop"
                    # The cache of an ended sample would keep the whole batch's previous caches.
                    response.prompt_cache = None
                sampler.samples = [
                    drawn_of[each.uid] for each in responses if each.finish_reason is None
                ]
        except MlxTuneError:  # a ModelError is a ValueError too
            raise
        except ValueError as problem:  # mlx-lm's for a cache without `merge`
            raise ModelError(
                f"mlx-lm cannot sample several answers of this architecture together: {problem}"
            ) from problem
    checked.finish()
    sampler.finish()
    # A sample that ended got one more token, before mlx-lm saw its end.
    return [
        SampledAnswer(tuple(one.tokens), tuple(one.logps[: len(one.tokens)]), one.finished)
        for one in samples
    ]


def _prefill(
    model: nn.Module, ids: TokenArrays, requests: Sequence[SampleRequest]
) -> list[list[Any]]:
    """Return a cache of all but the last token of each prompt; equal prompts share one.

    mlx-lm copies them into the caches of its batch.
    """
    caches: dict[tuple[int, ...], list[Any]] = {}
    for request in requests:
        if request.prompt not in caches:
            cache = make_prompt_cache(model)
            tokens = ids.array(list(request.prompt))
            for start in range(0, len(tokens) - 1, _PREFILL_TOKENS):
                model(
                    tokens[None, start : min(start + _PREFILL_TOKENS, len(tokens) - 1)], cache=cache
                )
                mx.eval([each.state for each in cache])
            caches[request.prompt] = cache
    return [caches[request.prompt] for request in requests]


def sampling_memory(
    base: BaseModel, prompt_length: int, max_new_tokens: int, answers: int
) -> tuple[int, int]:
    """Return the bytes of caches, and of logits, while this many answers are sampled.

    `prompt_length` is the length of the longest prompt, to which mlx-lm pads the others.
    """
    text, count = base.text_config, min(answers, _MAX_BATCH)
    heads = text.get("num_attention_heads") or 1
    head_dim = text.get("head_dim") or base.hidden_size // heads
    width = 2 * (text.get("num_key_value_heads") or heads) * head_dim
    if rank := text.get("kv_lora_rank"):
        width = rank + (text.get("qk_rope_head_dim") or 0)
    last = _GROWTH * ceil(max_new_tokens / _GROWTH)
    tokens, longest = 0, 0
    for cache in make_prompt_cache(base.model):
        if not isinstance(cache, ArraysCache):  # the state of a recurrence does not grow
            extended = min(
                prompt_length + last, getattr(cache, "max_size", None) or prompt_length + last
            )
            tokens += count * extended
            longest = max(longest, extended)
    each, logits = width * getattr(mx, base.dtype).size, _LOGITS * 4 * count * base.own_vocab
    # The caches of a token are extended before it has logits.
    extending = ceil(_LAYER_COPIES * each * count * longest)
    return each * tokens + max(extending - logits, 0), logits


def _fitting(
    caches: Sequence[list[Any]], requests: Sequence[SampleRequest], sampling: Sampling
) -> int:
    """Return how many samples fit in memory together, at least 1, by the size of their caches."""
    most = 0.0
    for request, cache in zip(requests, caches, strict=True):
        size = sum(each.nbytes for each in cache)
        longest = len(request.prompt) + sampling.max_new_tokens + _GROWTH
        most = max(most, size / max(len(request.prompt) - 1, _GROWTH) * longest)
    free = mx.get_memory_limit() - mx.get_active_memory()
    return max(int(free // (_COPIES * most)), 1) if most else len(requests)


class _KeyedSampler:
    """Draws the next token of each sample with the sample's own key.

    `samples` take part in the next call, in this order. The log-probabilities of tokens, at the
    sampling temperature, are read a call later, as waiting for them would idle the GPU.
    """

    def __init__(self, samples: list[_Drawn], sampling: Sampling) -> None:
        self.samples = samples
        self._sampling = sampling
        self._calls = 0
        self._waiting: tuple[list[_Drawn], mx.array] | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        if len(logprobs) != len(self.samples):
            raise RuntimeError(f"mlx-lm asks for {len(logprobs)} tokens, not {len(self.samples)}")
        self.finish()
        total = mx.array(0.0)
        if (temperature := self._sampling.temperature) not in (0, 1):
            logprobs = logprobs.astype(mx.float32) / temperature
            total = mx.logsumexp(logprobs, axis=-1)
        tokens = self._sample_tokens(logprobs)
        logps = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0].astype(mx.float32)
        logps -= total
        mx.async_eval(tokens, logps)  # type: ignore[no-untyped-call]
        self._waiting = self.samples, logps
        self._calls += 1
        return tokens

    def _sample_tokens(self, logprobs: mx.array) -> mx.array:
        sampling = self._sampling
        # The last call samples a token beyond the limit, which is dropped.
        if sampling.temperature == 0 or self._calls == sampling.max_new_tokens:
            return mx.argmax(logprobs, axis=-1)
        if sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        keys = mx.array(np.stack([one.keys[self._calls] for one in self.samples]))
        draw = mx.vmap(lambda logps, key: mx.random.categorical(logps, key=key))
        tokens: mx.array = draw(logprobs.astype(mx.float32), keys)
        return tokens

    def finish(self) -> None:
        """Read the log-probabilities of the last call."""
        if self._waiting is not None:
            samples, logps = self._waiting
            for one, logp in zip(samples, np.array(logps), strict=True):
                one.logps.append(float(logp))
            self._waiting = None
