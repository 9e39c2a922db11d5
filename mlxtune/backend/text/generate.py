"""Generates a model's answers with mlx-lm: one as a stream, or many in batches."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as GeneratorType
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlxtune.backend.device import default_device
from mlxtune.backend.device.retry import Result, with_retries
from mlxtune.backend.models.token_array import TokenArrays
from mlxtune.backend.text.tokenizer import ModelTokenizer
from mlxtune.core.data.prompt import Prompt
from mlxtune.core.data.text_stream import TextStream, text_of
from mlxtune.core.machine.gpu_faults import Fault, fault_error, fault_of
from mlxtune.errors import MlxTuneError, ModelError

# The maximum number of prompts in a batch.
_MAX_BATCH = 32


def seed(number: int) -> None:
    """Seed the sampler."""
    mx.random.seed(number)


@contextmanager
def uncompiled_on_cpu() -> Iterator[None]:
    """Let MLX compile nothing inside the block if it runs on the CPU.

    There, compiling starts a C++ compiler, which takes seconds and may be missing.
    """
    on_cpu = default_device.on_cpu()
    if on_cpu:
        mx.disable_compile()
    try:
        yield
    finally:
        # This restores MLX's initial state, which cannot be queried.
        if on_cpu and not os.environ.get("MLX_DISABLE_COMPILE"):
            mx.enable_compile()


@dataclass(frozen=True)
class Sampling:
    """The options for sampling an answer, which mean the same as in mlx-lm.

    `temperature` 0 takes the likeliest token; `top_k` 0 and `top_p` 1 set no limit.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def sampler(self, vocab_size: int) -> Callable[[mx.array], mx.array]:
        """Return mlx-lm's sampler, which maps log-probabilities (B, V) to tokens (B,)."""
        # mlx-lm rejects a top_k that covers the whole vocabulary, so 0 replaces it.
        top_k = 0 if vocab_size and self.top_k >= vocab_size else self.top_k
        sampler = make_sampler(self.temperature, top_p=self.top_p, top_k=top_k)

        def uncompiled(logprobs: mx.array) -> mx.array:
            with uncompiled_on_cpu():
                return sampler(logprobs)

        return uncompiled if default_device.on_cpu() else sampler


@dataclass(frozen=True)
class Answer:
    """A generated answer. `finish_reason` is `stop`, `length`, or `interrupted`.

    `tokens` include the token that ended the answer. Of the `prompt_tokens`, `reused` were in the
    cache. `tokens_per_second` excludes the first token.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    reused: int
    prompt_seconds: float
    tokens_per_second: float

    def __str__(self) -> str:
        return self.text


# Yields pieces of an answer's text, and returns the whole answer.
Stream = GeneratorType[str, None, Answer]


class _StoppedError(Exception):
    """Raised in mlx-lm's progress callback, because only an error ends the reading of a prompt."""


class Generator:
    """Answers prompts one after another, and keeps the cache of the last prompt and its answer.

    If the next prompt starts with the same tokens, these do not run again, unless the cache also
    has other tokens and cannot be trimmed. Call `forget` when the model has changed.
    """

    def __init__(self, model: nn.Module, tokenizer: ModelTokenizer, vocab_size: int) -> None:
        model.eval()
        self._model, self._tokenizer, self._vocab_size = model, tokenizer, vocab_size
        self._ids = TokenArrays(model)
        self.forget()

    def forget(self) -> None:
        """Drop the cache, so that all tokens of the next prompt run."""
        self._cache: list[Any] | None = None
        self._cached: list[int] = []

    def answer(
        self,
        prompt: Prompt,
        sampling: Sampling,
        on_text: Callable[[str], None] = lambda text: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Generate an answer as `stream` does; call `on_text` with each piece of text."""
        stream = self.stream(prompt, sampling, should_stop)
        while True:
            try:
                if text := next(stream):
                    on_text(text)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Stream:
        """Yield the text that each token adds, in whole characters; the text may be empty.

        The generator returns the Answer. `should_stop` is called after each token, and while a long
        prompt is read; if it returns True, the answer ends there. Between two tokens, the caller
        may change the model, but must restore it. Raises MemoryLimitError or GpuError after a fault
        of the GPU, and ModelError if a logit is NaN or a token has no row in the embedding.
        """
        started = time.perf_counter()
        cache, reused = self._prefill_cache(prompt.ids)
        # An exception may leave the cache incomplete.
        self.forget()
        stream = TextStream((*sampling.stop, prompt.end_text))
        shown: list[str] = []
        tokens: list[int] = []
        stop_tokens, reason, first = self._tokenizer.eos_ids | {prompt.end}, "length", started
        try:
            for token in self._steps(prompt.ids[reused:], cache, sampling, should_stop):
                if not tokens:
                    first = time.perf_counter()
                tokens.append(token)
                if token not in stop_tokens:
                    shown.append(stream.add(self._tokenizer.token_bytes([token])[0]))
                    yield shown[-1]
                if token in stop_tokens or stream.stopped:
                    reason = "stop"
                    break
                if should_stop():
                    reason = "interrupted"
                    break
            self._keep(cache, [*prompt.ids, *tokens])
        except _StoppedError:
            reason = "interrupted"
        shown.append(stream.finish())
        yield shown[-1]
        elapsed = time.perf_counter() - first
        return Answer(
            text="".join(shown),
            tokens=tuple(tokens),
            finish_reason=reason,
            prompt_tokens=len(prompt.ids),
            reused=reused,
            prompt_seconds=first - started,
            tokens_per_second=(len(tokens) - 1) / elapsed if len(tokens) > 1 else 0.0,
        )

    def _steps(
        self,
        ids: Sequence[int],
        cache: list[Any],
        sampling: Sampling,
        should_stop: Callable[[], bool],
    ) -> Iterator[int]:
        def on_progress(done: int, total: int) -> None:
            if done < total and should_stop():
                raise _StoppedError

        sampler = CheckedSampler(sampling.sampler(self._vocab_size))
        steps = generate_step(
            self._ids.array(list(ids)),
            self._model,
            max_tokens=sampling.max_new_tokens,
            sampler=sampler,
            prompt_cache=cache,
            prompt_progress_callback=on_progress,
        )
        with _faults_as_errors():
            for token, _ in steps:
                # mlx-lm is already computing the next token.
                sampler.finish(but=1)
                yield int(token)
            sampler.finish()

    def _prefill_cache(self, ids: Sequence[int]) -> tuple[list[Any], int]:
        """Return a cache of the first tokens of a prompt, and the number of cached tokens."""
        pairs = zip(self._cached, ids[:-1], strict=False)
        # The last token always runs, for its logits.
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        surplus = len(self._cached) - shared
        if not self._cache or not shared or (surplus and not can_trim_prompt_cache(self._cache)):
            return make_prompt_cache(self._model), 0
        if surplus:
            trim_prompt_cache(self._cache, surplus)
        return self._cache, shared

    def _keep(self, cache: list[Any], tokens: list[int]) -> None:
        # The cache should hold all tokens; if its length differs, it is not kept.
        if getattr(cache[0], "offset", len(tokens)) == len(tokens):
            self._cache, self._cached = cache, tokens


class CheckedSampler:
    """A sampler that raises ModelError if a logit is NaN.

    Minus infinity is allowed, as it excludes a token. A call checks the logits of two calls ago,
    which are already computed: waiting for newer logits would idle the GPU. `finish` checks the
    rest.
    """

    def __init__(self, sampler: Callable[[mx.array], mx.array]) -> None:
        self._sampler = sampler
        self._nan_flags: list[mx.array] = []

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.finish(but=1)
        has_nan = mx.isnan(logprobs).any()
        mx.async_eval(has_nan)  # type: ignore[no-untyped-call]
        self._nan_flags.append(has_nan)
        return self._sampler(logprobs)

    def finish(self, but: int = 0) -> None:
        """Check the logits of all calls except the last `but` calls."""
        while len(self._nan_flags) > but:
            if self._nan_flags.pop(0).item():
                raise ModelError(
                    "the model's logits are not finite numbers: its weights or its adapter "
                    "are broken: download them again, or name another adapter"
                )


@contextmanager
def _faults_as_errors() -> Iterator[None]:
    """Turn a GPU fault inside the block into MemoryLimitError or GpuError, with a remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (fault := fault_of(error)) is None:
            raise
        raise fault_error_of(fault, str(error)) from error


def fault_error_of(fault: Fault, text: str) -> MlxTuneError:
    remedy = "shorten the prompt, lower --max-new-tokens, or use a quantised base"
    remedy = remedy if fault is Fault.OUT_OF_MEMORY else ""
    return fault_error(fault, text, "while the answer was generated", remedy)


def answer_prompts(
    model: nn.Module,
    tokenizer: ModelTokenizer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocab_size: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Return the answer to each prompt.

    `on_progress` is called after each batch, with the number of finished answers and the total.
    After a fault of the GPU, the batch is retried, with fewer prompts if that helps. The `stop`
    texts are ignored, but an answer stops at the text that ends turns in its prompt's template.

    Raises MemoryLimitError or GpuError if no retry helps, and ModelError if a logit is NaN or the
    model's embedding has no row for a token.
    """
    model.eval()
    ids = TokenArrays(model)
    # Sorting by length minimises padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))

    def answer(indices: Sequence[int]) -> list[str]:
        batch = [prompts[i] for i in indices]
        stop_tokens = tokenizer.eos_ids | {each.end for each in batch if each.end is not None}
        # All that mlx-lm needs of a tokenizer if prompts are already tokenised.
        used = SimpleNamespace(
            eos_token_ids=stop_tokens, decode=lambda ids: text_of(tokenizer.token_bytes(ids))
        )
        sampler = CheckedSampler(sampling.sampler(vocab_size))
        try:
            texts = batch_generate(
                model,
                used,
                [ids.check(each.ids).tolist() for each in batch],
                max_tokens=sampling.max_new_tokens,
                sampler=sampler,
            ).texts
            sampler.finish()
            return [
                text.partition(each.end_text)[0] if each.end_text else text
                for text, each in zip(texts, batch, strict=True)
            ]
        except MlxTuneError:  # a ModelError is a ValueError too
            raise
        except ValueError:  # an architecture whose cache mlx-lm cannot batch
            generator = Generator(model, tokenizer, vocab_size)
            return [generator.answer(each, sampling).text for each in batch]

    return in_batches(answer, order, _MAX_BATCH, on_progress)


def in_batches(
    answer: Callable[[Sequence[int]], Sequence[Result]],
    order: Sequence[int],
    at_once: int,
    on_progress: Callable[[int, int], None],
) -> list[Result]:
    """Return the answer of each index, from 0, after `answer` got batches of them in an order.

    `answer` may leave out the last ones of a batch, which are then in the next. After a fault of
    the GPU, the batch is retried, with fewer indices if that helps. Raises MemoryLimitError or
    GpuError if no retry helps.
    """
    answered = dict[int, Result]()

    def batch() -> Sequence[int]:
        return order[len(answered) : len(answered) + at_once]

    def change(fault: Fault, text: str) -> None:
        nonlocal at_once
        if fault.asks_for_less:
            if len(batch()) == 1:
                raise fault_error_of(fault, text)
            at_once = len(batch()) // 2

    while len(answered) < len(order):
        results = with_retries(lambda: answer(batch()), change)
        answered.update(zip(batch(), results, strict=False))
        on_progress(len(answered), len(order))
    return [answered[i] for i in range(len(order))]
