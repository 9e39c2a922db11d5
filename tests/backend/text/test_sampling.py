"""Samples drawn together equal samples drawn alone, and each prompt runs once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import batch_generate

from mlxtune.backend.models.loading import load_base
from mlxtune.backend.text import sampling as sampling_module
from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.text.sampling import sample
from mlxtune.core.objectives.policy import SampledAnswer, SampleRequest
from mlxtune.errors import ModelError
from tests.experts import EXPERTS
from tests.models import VOCAB_SIZE, write_model
from tests.slow import slow_except

MAX_TOKENS = 12
GREEDY, RANDOM = (Sampling(max_new_tokens=MAX_TOKENS, temperature=t) for t in (0.0, 1.0))
# Frequent enough that answers have different lengths.
ENDS = frozenset(range(0, VOCAB_SIZE, 9))
_RNG = np.random.default_rng(4)
PROMPTS = [tuple(_RNG.integers(0, VOCAB_SIZE, size).tolist()) for size in (14, 5, 1)]


@pytest.fixture(
    scope="module", params=slow_except(["qwen3", "gemma3_text", "qwen3_next"], "gemma3_text")
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    name = request.param
    folder = write_model(tmp_path_factory.mktemp("models") / name, name, **EXPERTS.get(name, {}))
    return load_base(folder, "float32").model


def requests(step: int = 1, count: int = 4) -> list[SampleRequest]:
    return [
        SampleRequest(prompt, (42, step, row, number))
        for row, prompt in enumerate(PROMPTS)
        for number in range(count)
    ]


def assert_same(found: list[SampledAnswer], expected: list[SampledAnswer]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.finished for each in found] == [each.finished for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logps == pytest.approx(other.logps, abs=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_samples_drawn_together_equal_samples_drawn_alone(
    model: nn.Module, sampling: Sampling
) -> None:
    asked = requests()
    together = sample(model, asked, sampling, ENDS)
    assert_same(together, [sample(model, [each], sampling, ENDS)[0] for each in asked])
    turned = sample(model, asked[::-1], sampling, ENDS)
    assert_same(turned[::-1], together)
    assert sampling == GREEDY or len({len(each.tokens) for each in together}) > 2


def test_samples_depend_on_each_seed(model: nn.Module) -> None:
    first, again, other = (
        [each.tokens for each in sample(model, requests(step), RANDOM, ENDS)] for step in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first[:4])) > 1


def logits_of(model: nn.Module, tokens: list[int]) -> Any:
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def test_answers_keep_their_tokens_and_log_probabilities(model: nn.Module) -> None:
    found = sample(model, requests(), RANDOM, ENDS)
    assert {each.finished for each in found} == {True, False}
    for request, answer in zip(requests(), found, strict=True):
        *before, last = answer.tokens
        assert not ENDS & set(before)
        assert answer.finished == (last in ENDS)
        assert answer.finished or len(answer.tokens) == MAX_TOKENS
        logps = logits_of(model, [*request.prompt, *before])[len(request.prompt) - 1 :]
        expected = logps[np.arange(len(answer.tokens)), answer.tokens]
        assert answer.logps == pytest.approx(expected.tolist(), abs=1e-4)


def test_greedy_answers_equal_those_of_mlx_lm(model: nn.Module) -> None:
    found = sample(model, requests(count=1), GREEDY, frozenset({VOCAB_SIZE + 1}))

    class Tokenizer:
        eos_token_ids = (VOCAB_SIZE + 1,)

        def decode(self, ids: list[int]) -> str:
            return ""

    expected = batch_generate(
        model,
        Tokenizer(),
        [list(prompt) for prompt in PROMPTS],
        max_tokens=MAX_TOKENS,
        return_token_ids=True,
        return_logprobs=True,
    )
    assert expected.token_ids == [list(each.tokens) for each in found]
    for answer, logps in zip(found, expected.logprobs or [], strict=True):
        assert answer.logps == pytest.approx(logps, abs=1e-4)


def test_tokens_are_drawn_by_their_probability() -> None:
    """The first token of many samples, against the model's distribution."""

    class Fixed(nn.Module):
        layers: tuple[Any, ...] = ()

        def make_cache(self) -> list[Any]:
            from mlx_lm.models.cache import ArraysCache

            return [ArraysCache(1)]

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            for each in cache:
                each[0] = mx.zeros((tokens.shape[0], 1))
            logits = mx.log(mx.array([0.5, 0.3, 0.15, 0.05]))
            return mx.broadcast_to(logits, (*tokens.shape, 4))

    def first(sampling: Sampling) -> Counter[int]:
        asked = [SampleRequest((1, 2), (number,)) for number in range(4000)]
        return Counter(each.tokens[0] for each in sample(Fixed(), asked, sampling, frozenset({9})))

    drawn = first(Sampling(max_new_tokens=1, temperature=1.0))
    for token, probability in enumerate((0.5, 0.3, 0.15, 0.05)):
        # Five standard deviations.
        spread = 5 * np.sqrt(4000 * probability * (1 - probability))
        assert abs(drawn[token] - 4000 * probability) < spread
    nucleus = first(Sampling(max_new_tokens=1, temperature=1.0, top_p=0.7))
    assert set(nucleus) == {0, 1}
    assert abs(nucleus[0] - 2500) < 160
    cold = first(Sampling(max_new_tokens=1, temperature=0.5))
    squares = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    assert abs(cold[0] - 4000 * squares[0] / squares.sum()) < 160


def test_each_prompt_runs_once(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    call = type(model).__call__

    def counted(self: nn.Module, tokens: mx.array, *rest: Any, **named: Any) -> Any:
        ran.append(tokens.size)
        return call(self, tokens, *rest, **named)

    monkeypatch.setattr(type(model), "__call__", counted)
    monkeypatch.setattr(sampling_module, "_PREFILL_TOKENS", 6)
    found = sample(model, requests(), RANDOM, ENDS)
    # The last token of a prompt runs with each sample, as a first input.
    prompts = sum(len(prompt) - 1 for prompt in PROMPTS)
    # mlx-lm runs a row once more before it sees that the row has ended.
    assert sum(ran) == prompts + sum(len(each.tokens) + 1 for each in found)


def test_progress_counts_answers_in_batches(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sample(model, requests(), RANDOM, ENDS)
    monkeypatch.setattr(sampling_module, "_MAX_BATCH", 5)
    seen: list[tuple[int, int]] = []
    parts = sample(model, requests(), RANDOM, ENDS, lambda *each: seen.append(each))
    assert seen == [(5, 12), (10, 12), (12, 12)]
    assert_same(parts, whole)


def test_samples_that_do_not_fit_in_memory_are_drawn_one_by_one(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sample(model, requests(), RANDOM, ENDS)
    monkeypatch.setattr(mx, "get_memory_limit", lambda: 0)
    seen: list[int] = []
    parts = sample(model, requests(), RANDOM, ENDS, lambda done, total: seen.append(done))
    assert seen == list(range(1, 13))
    assert_same(parts, whole)


def test_fault_of_memory_halves_the_batch(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sample(model, requests(), RANDOM, ENDS)
    draw, sizes = sampling_module._draw, []

    def failing(model: Any, ids: Any, asked: Any, *rest: Any) -> Any:
        sizes.append(len(asked))
        if len(asked) > 6:
            raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")
        return draw(model, ids, asked, *rest)

    monkeypatch.setattr(sampling_module, "_draw", failing)
    assert_same(sample(model, requests(), RANDOM, ENDS), whole)
    assert sizes == [12, 6, 6]


def test_cache_that_mlx_lm_cannot_batch_is_an_error(tmp_path: Path) -> None:
    llama = load_base(write_model(tmp_path / "llama4", "llama4", **EXPERTS["llama4"]), "float32")
    with pytest.raises(ModelError, match="several answers of this architecture"):
        sample(llama.model, requests(), RANDOM, ENDS)


@pytest.mark.parametrize("max_new_tokens", [1, 9])
def test_nan_logits_are_an_error_of_the_model(tmp_path: Path, max_new_tokens: int) -> None:
    model = load_base(write_model(tmp_path / "model", "qwen3"), "float32").model
    model.model.norm.weight = model.model.norm.weight * float("nan")
    sampling = replace(RANDOM, max_new_tokens=max_new_tokens)
    with pytest.raises(ModelError, match=r"^the model's logits are not finite numbers"):
        sample(model, requests(), sampling, frozenset())


def test_token_beyond_the_vocabulary_is_an_error(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="embedding has"):
        sample(model, [SampleRequest((1, 10**6, 2), (1,))], RANDOM, ENDS)
