"""Answers of a model: one as it comes, or many at once; mlx-lm generates them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlxtune.backend.model import device, memory
from mlxtune.core.data.prompt import Prompt
from mlxtune.core.data.text_stream import TextStream, text_of
from mlxtune.errors import MemoryLimitError, MlxTuneError

# Prompts that are answered at once.
_AT_ONCE = 32


def seed(number: int) -> None:
    """Have what is drawn from here on be a function of a number."""
    mx.random.seed(number)


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn, and how long it may be: the options of the same names.

    `temperature` 0 takes the likeliest token; `top_k` 0 and `top_p` 1 are off. What each means is
    as mlx-lm has it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def sampler(self, vocab_size: int) -> Callable[[mx.array], mx.array]:
        """Return mlx-lm's function from log-probabilities (B, V) to tokens (B,)."""
        # As many as there are is all of them, which mlx-lm takes for a mistake.
        top_k = 0 if vocab_size and self.top_k >= vocab_size else self.top_k
        sampler = make_sampler(self.temperature, top_p=self.top_p, top_k=top_k)
        return _uncompiled(sampler) if device.on_cpu() else sampler


def _uncompiled(sampler: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    """Return a sampler whose parts MLX does not compile: the same tokens are drawn.

    On the CPU it would start a C++ compiler for that, which takes seconds and may not be whole.
    """

    def sample(logprobs: mx.array) -> mx.array:
        mx.disable_compile()
        try:
            return sampler(logprobs)
        finally:
            # As MLX begins, which knows no way to ask.
            if not os.environ.get("MLX_DISABLE_COMPILE"):
                mx.enable_compile()

    return sample


@dataclass(frozen=True)
class Answer:
    """What was generated. `finish_reason` is `stop`, `length`, or `interrupted`.

    `tokens` are all that were generated, what ended them included; `prompt_tokens` those of the
    prompt, `reused` how many of them had been run before. `tokens_per_second` counts from the first
    token on.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    reused: int
    prompt_seconds: float
    tokens_per_second: float


class Spelling(Protocol):
    """What is asked of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def spell(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token stands for."""


class _Stopped(Exception):
    """Ends the reading of a long prompt."""


class Generator:
    """Answers prompts one after the other, with what it has run of the last one kept.

    Where a prompt begins as the last one, with its answer, did, only the rest is run. `forget` is
    to be called when the model has changed.
    """

    def __init__(self, model: nn.Module, tokenizer: Spelling, vocab_size: int) -> None:
        model.eval()
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.forget()

    def forget(self) -> None:
        """Run the next prompt from its start."""
        self._cache: list[Any] | None = None
        self._cached: list[int] = []

    def answer(
        self,
        prompt: Prompt,
        sampling: Sampling,
        on_text: Callable[[str], None] = lambda text: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Generate an answer; `on_text` hears of its text as it comes, in whole characters.

        `should_stop` is asked after each token, and while a long prompt is read: the answer is then
        what there is of it.

        Raises MemoryLimitError where memory runs out.
        """
        started = time.perf_counter()
        cache, reused = self._prepared(prompt.ids)
        # What an exception leaves of it is not whole.
        self.forget()
        stream = TextStream((*sampling.stop, prompt.end_text))
        shown: list[str] = []
        tokens: list[int] = []
        ends, reason, first = self._tokenizer.eos_ids | {prompt.end}, "length", started

        def show(text: str) -> None:
            if text:
                shown.append(text)
                on_text(text)

        try:
            for token in self._steps(prompt.ids[reused:], cache, sampling, should_stop):
                if not tokens:
                    first = time.perf_counter()
                tokens.append(token)
                if token in ends:
                    reason = "stop"
                    break
                show(stream.add(self._tokenizer.spell([token])[0]))
                if stream.stopped:
                    reason = "stop"
                    break
                if should_stop():
                    reason = "interrupted"
                    break
            self._keep(cache, [*prompt.ids, *tokens])
        except _Stopped:
            reason = "interrupted"
        show(stream.finish())
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
                raise _Stopped

        steps = generate_step(
            mx.array(list(ids)),
            self._model,
            max_tokens=sampling.max_new_tokens,
            sampler=sampling.sampler(self._vocab_size),
            prompt_cache=cache,
            prompt_progress_callback=on_progress,
        )
        with _memory_as_error():
            for token, _ in steps:
                yield int(token)

    def _prepared(self, ids: Sequence[int]) -> tuple[list[Any], int]:
        """Return a cache that holds the first tokens of a prompt, and how many of them."""
        pairs = zip(self._cached, ids, strict=False)
        shared = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        # The last token is run in any case: what follows it is asked for.
        shared = min(len(self._cached) if shared is None else shared, len(ids) - 1)
        surplus = len(self._cached) - shared
        if self._cache is None or not shared:
            return make_prompt_cache(self._model), 0
        if surplus and not can_trim_prompt_cache(self._cache):
            return make_prompt_cache(self._model), 0
        if surplus:
            trim_prompt_cache(self._cache, surplus)
        return self._cache, shared

    def _keep(self, cache: list[Any], tokens: list[int]) -> None:
        # mlx-lm has run each token that it gave; what says otherwise is not kept.
        if getattr(cache[0], "offset", len(tokens)) == len(tokens):
            self._cache, self._cached = cache, tokens


@contextmanager
def _memory_as_error() -> Iterator[None]:
    """Within it, an error that says that memory ran out becomes one that a person can mend."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MlxTuneError) or not memory.ran_out(error):
            raise
        raise MemoryLimitError(
            "memory ran out while the answer was generated: "
            "ask with less before it, lower --max-new-tokens, or use a quantised base"
        ) from error


@dataclass(frozen=True)
class _Ends:
    """What mlx-lm asks of a tokenizer where prompts are tokens already."""

    tokenizer: Spelling
    eos_token_ids: frozenset[int]

    def decode(self, ids: Sequence[int]) -> str:
        return text_of(self.tokenizer.spell(ids))


def answers(
    model: nn.Module,
    tokenizer: Spelling,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocab_size: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Return the answer to each prompt, many at a time; `tell` hears how many are done.

    Stop texts are not looked for. Raises MemoryLimitError where memory runs out.
    """
    model.eval()
    found = [""] * len(prompts)
    # Neighbours in length are padded least.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    for start in range(0, len(order), _AT_ONCE):
        chosen = order[start : start + _AT_ONCE]
        texts = _together(model, tokenizer, [prompts[i] for i in chosen], sampling, vocab_size)
        for i, text in zip(chosen, texts, strict=True):
            found[i] = text
        tell(start + len(chosen), len(order))
    return found


def _together(
    model: nn.Module,
    tokenizer: Spelling,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocab_size: int,
) -> list[str]:
    ends = tokenizer.eos_ids | {prompt.end for prompt in prompts if prompt.end is not None}
    try:
        with _memory_as_error():
            return batch_generate(
                model,
                _Ends(tokenizer, ends),
                [list(prompt.ids) for prompt in prompts],
                max_tokens=sampling.max_new_tokens,
                sampler=sampling.sampler(vocab_size),
            ).texts
    except ValueError:  # an architecture whose cache mlx-lm cannot batch
        generator = Generator(model, tokenizer, vocab_size)
        return [generator.answer(prompt, sampling).text for prompt in prompts]
