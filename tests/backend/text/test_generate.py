"""Answers equal mlx-lm's token by token, and reuse the last prompt's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load

from mlxtune import TrainConfig, train
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import load_adapted
from mlxtune.backend.device import default_device
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.text import generate
from mlxtune.backend.text.generate import Generator, Sampling, answer_prompts, seed
from mlxtune.backend.text.tokenizer import load_tokenizer
from mlxtune.core.data.prompt import Prompt
from mlxtune.core.data.text_stream import text_of
from mlxtune.errors import MemoryLimitError, ModelError
from tests.models import sums, write_chat, write_model
from tests.slow import slow

GREEDY = Sampling(max_new_tokens=24)


class Bytes:
    """A tokenizer that spells token 5 as [5]; token 0 ends a generation."""

    eos_ids = frozenset({0})

    def token_bytes(self, ids: Any) -> list[bytes]:
        return [f"[{i}]".encode() for i in ids]


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def generator(folder: Path) -> Generator:
    return Generator(load_base(folder, "float32").model, Bytes(), 320)


def greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    """Return the model's greedy tokens, computed without a cache."""
    model, tokens = load_base(folder, "float32").model, list(ids)
    for _ in range(count):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
        if tokens[-1] == 0:
            break
    return tokens[len(ids) :]


def test_greedy_tokens_and_text_match_the_golden_run(shared: Path) -> None:
    folder = shared / "models" / "stories260k"
    golden = json.loads((folder / "golden.json").read_text())
    base, tokenizer = load_base(folder, "float32"), load_tokenizer(folder)
    ids = golden["greedy_ids"]
    prompt, rest = ids[:1], ids[1:]
    made = Generator(base.model, tokenizer, base.vocab_size)
    said: list[str] = []
    found = made.answer(
        Prompt(tuple(prompt), None), Sampling(max_new_tokens=len(rest)), said.append
    )
    assert list(found.tokens) == rest
    assert found.finish_reason == "length"
    assert "".join(said) == found.text
    assert found.text.strip() == golden["greedy_text"].strip()


def test_greedy_tokens_match_whole_sequences(folder: Path) -> None:
    found = generator(folder).answer(Prompt((7, 8, 9, 20), None), GREEDY)
    assert list(found.tokens) == greedy(folder, [7, 8, 9, 20], 24)


def test_adapted_answer_matches_mlx_lm(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3")
    rows = write_chat(tmp_path / "chat.jsonl", sums(20))
    output = tmp_path / "out" / "adapters.safetensors"
    options: dict[str, Any] = {"lr": 1e-2, "targets": ("all",), "samples": 0, "quiet": True}
    train(TrainConfig(str(model), str(rows), output=str(output), **options))
    theirs, tokenizer = load(str(model), adapter_path=str(output.parent))
    ids = tokenizer.encode("What is 3 + 21?")
    expected = [each.token for each in stream_generate(theirs, tokenizer, ids, max_tokens=30)]
    adapted = load_adapted(load_base(model, "float32"), AdapterFile.find(str(output)))
    made = Generator(adapted.model, load_tokenizer(model), adapted.base.vocab_size)
    prompt, sampling = Prompt(tuple(ids), None), Sampling(max_new_tokens=30)
    assert list(made.answer(prompt, sampling).tokens) == expected
    adapted.use_adapter(False)
    made.forget()
    plain, _ = load(str(model))
    base = list(made.answer(prompt, sampling).tokens)
    assert base == [each.token for each in stream_generate(plain, tokenizer, ids, max_tokens=30)]
    assert base != expected


def test_batched_answers_match_single_answers(folder: Path) -> None:
    prompts = [Prompt(tuple(range(3, 4 + n)), None) for n in (9, 1, 5, 14)]
    told: list[tuple[int, int]] = []
    model = load_base(folder, "float32").model
    found = answer_prompts(
        model, Bytes(), prompts, GREEDY, on_progress=lambda *done: told.append(done)
    )
    alone = [greedy(folder, list(prompt.ids), 24) for prompt in prompts]
    spelled = [[token for token in tokens if token != 0] for tokens in alone]
    assert found == [text_of(Bytes().token_bytes(tokens)) for tokens in spelled]
    assert told == [(4, 4)]


def test_batches_shrink_when_memory_runs_out_and_retry_transient_faults(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(tuple(range(3, 4 + n)), None) for n in (9, 1, 5, 14)]
    model = load_base(folder, "float32").model
    short = Sampling(max_new_tokens=3)
    expected = answer_prompts(model, Bytes(), prompts, short)
    whole, sizes = generate.batch_generate, []
    texts = iter(["", "[malloc] Unable to allocate 9 bytes.", "Innocent Victim"])

    def failing(model: Any, tokenizer: Any, prompts: list[Any], **options: Any) -> Any:
        sizes.append(len(prompts))
        if text := next(texts, ""):
            raise RuntimeError(text)
        return whole(model, tokenizer, prompts, **options)

    monkeypatch.setattr(generate, "batch_generate", failing)
    monkeypatch.setattr(generate, "_MAX_BATCH", 3)
    told: list[tuple[int, int]] = []
    found = answer_prompts(
        model, Bytes(), prompts * 2, short, on_progress=lambda *done: told.append(done)
    )
    assert found == expected * 2
    assert sizes == [3, 3, 1, 1, 1, 1, 1, 1]
    assert told == [(3, 8), (4, 8), (5, 8), (6, 8), (7, 8), (8, 8)]


def test_prompt_that_takes_too_much_memory_alone_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **options: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate 9 bytes.")

    monkeypatch.setattr(generate, "batch_generate", failing)
    model = load_base(folder, "float32").model
    prompts = [Prompt((3, 4), None)] * 5
    with pytest.raises(MemoryLimitError, match="while the answer was generated: shorten"):
        answer_prompts(model, Bytes(), prompts, GREEDY)


def test_end_of_the_turn_ends_the_answer_and_is_not_shown(folder: Path) -> None:
    tokens = greedy(folder, [7, 8, 9, 20], 24)
    at = max(i for i, token in enumerate(tokens) if token not in tokens[:i])
    found = generator(folder).answer(Prompt((7, 8, 9, 20), tokens[at]), GREEDY)
    assert list(found.tokens) == tokens[: at + 1]
    assert found.finish_reason == "stop"
    assert found.text == text_of(Bytes().token_bytes(tokens[:at]))


def test_stop_text_over_two_tokens_is_never_printed(folder: Path) -> None:
    tokens = greedy(folder, [7, 8, 9, 20], 6)
    stop = f"{tokens[3]}][{tokens[4]}"
    sampling = Sampling(max_new_tokens=24, stop=(stop,))
    said: list[str] = []
    found = generator(folder).answer(Prompt((7, 8, 9, 20), None), sampling, said.append)
    whole = text_of(Bytes().token_bytes(tokens))
    assert found.text == "".join(said) == whole.partition(stop)[0]
    assert found.finish_reason == "stop"


# Sampling


def drawn(folder: Path, number: int, **options: Any) -> list[int]:
    seed(number)
    sampling = Sampling(max_new_tokens=12, **options)
    return list(generator(folder).answer(Prompt((7, 8, 9), None), sampling).tokens)


def test_draws_are_a_function_of_the_seed(folder: Path) -> None:
    assert drawn(folder, 3, temperature=1.5) == drawn(folder, 3, temperature=1.5)
    assert drawn(folder, 3, temperature=1.5) != drawn(folder, 4, temperature=1.5)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}])
def test_the_likeliest_alone_is_greedy(folder: Path, options: dict[str, Any]) -> None:
    assert drawn(folder, 3, temperature=2.0, **options) == greedy(folder, [7, 8, 9], 12)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 10**6}])
def test_only_the_likeliest_are_drawn_as_mlx_lm_draws_them(options: dict[str, Any]) -> None:
    chances = np.array([0.4, 0.25, 0.15, 0.1, 0.1])
    logprobs = mx.broadcast_to(mx.log(mx.array(chances)), (400, 5))
    kept = {"top_k": 0, "top_p": 1.0} | options
    ours = Sampling(temperature=1.0, **kept).sampler(5)
    mx.random.seed(0)
    found = np.array(ours(logprobs))
    # The two likeliest tokens together have a probability of 0.65.
    wanted = 2 if "top_p" in options else min(options["top_k"], 5)
    assert set(found.tolist()) == set(range(wanted))
    if options.get("top_k") != 10**6:
        mx.random.seed(0)
        theirs = make_sampler(1.0, top_p=kept["top_p"], top_k=kept["top_k"])
        assert np.array_equal(found, np.array(theirs(logprobs)))


# A conversation


def test_shared_prefix_with_the_last_prompt_is_not_run_again(folder: Path) -> None:
    made = generator(folder)
    first = made.answer(Prompt((7, 8, 9, 20), None), Sampling(max_new_tokens=3))
    assert first.reused == 0
    longer = (7, 8, 9, 20, *first.tokens, 30, 31)
    second = made.answer(Prompt(longer, None), Sampling(max_new_tokens=5))
    assert second.reused == len(longer) - 2
    assert list(second.tokens) == greedy(folder, list(longer), 5)


@pytest.mark.parametrize("changed", [2, 5, 6])
def test_template_that_rewrites_earlier_turns_runs_from_there(folder: Path, changed: int) -> None:
    made = generator(folder)
    first = made.answer(Prompt((7, 8, 9, 20), None), Sampling(max_new_tokens=3))
    anew = [7, 8, 9, 20, *first.tokens, 30, 31]
    anew[changed] = 99
    second = made.answer(Prompt(tuple(anew), None), Sampling(max_new_tokens=5))
    assert second.reused == changed
    assert list(second.tokens) == greedy(folder, anew, 5)


@pytest.mark.parametrize("count", [3, 12, slow(20)])
def test_same_or_shorter_prompt_after_a_window_was_passed(folder: Path, count: int) -> None:
    made = generator(folder)
    made.answer(Prompt((7, 8, 9, 20), None), Sampling(max_new_tokens=count))
    for ids in ([7, 8, 9, 20], [7, 8]):
        found = made.answer(Prompt(tuple(ids), None), Sampling(max_new_tokens=5))
        assert list(found.tokens) == greedy(folder, ids, 5)


def test_stopped_answer_is_kept_and_the_chat_continues(folder: Path) -> None:
    made, said = generator(folder), []
    prompt = Prompt((7, 8, 9, 20), None)
    found = made.answer(prompt, GREEDY, said.append, lambda: len(said) >= 2)
    whole = greedy(folder, [7, 8, 9, 20], 8)
    assert (list(found.tokens), found.finish_reason) == (whole[:2], "interrupted")
    ids = (7, 8, 9, 20, *found.tokens, 40)
    again = made.answer(Prompt(ids, None), Sampling(max_new_tokens=5))
    assert again.reused == len(ids) - 1
    assert list(again.tokens) == greedy(folder, list(ids), 5)


def test_long_prompt_can_be_stopped_while_it_is_read(folder: Path) -> None:
    made = generator(folder)
    long = Prompt(tuple(np.random.default_rng(0).integers(1, 300, 2100).tolist()), None)
    found = made.answer(long, GREEDY, should_stop=lambda: True)
    assert (found.tokens, found.text, found.finish_reason) == ((), "", "interrupted")
    found = made.answer(Prompt((7, 8, 9, 20), None), Sampling(max_new_tokens=5))
    assert list(found.tokens) == greedy(folder, [7, 8, 9, 20], 5)


def test_prompt_cache_is_not_reused_after_an_error(folder: Path) -> None:
    made = generator(folder)

    def failing(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.answer(Prompt((7, 8, 9, 20), None), GREEDY, failing)
    found = made.answer(Prompt((7, 8, 9, 20, 21), None), Sampling(max_new_tokens=5))
    assert found.reused == 0
    assert list(found.tokens) == greedy(folder, [7, 8, 9, 20, 21], 5)


_DRAWN = """
import mlxtune.backend
import mlx.core as mx
from mlxtune.backend.text import generate
from mlxtune.backend.text.generate import Sampling

sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5)
logprobs = mx.log(mx.softmax(mx.random.normal((3, 320)), axis=-1))
print(sampling.sampler(320)(logprobs).tolist())
ones = mx.compile(lambda x: mx.exp(x * 2.5) + mx.sin(x) * x)
try:
    mx.eval(ones(logprobs))
except RuntimeError:
    print("compiles")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not default_device.on_cpu(), reason="a GPU compiles with no program of the machine's"
)
def test_drawing_starts_no_compiler_and_leaves_compiling_on(tmp_path: Path) -> None:
    """MLX would fail with this compiler, which rejects all input."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
    compiler.chmod(0o755)
    # MLX caches compiled code in TMPDIR.
    kept = {name: value for name, value in os.environ.items() if name != "MLX_DISABLE_COMPILE"}
    env = {**kept, "PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _DRAWN], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokens, compiles = done.stdout.splitlines()
    assert len(json.loads(tokens)) == 3
    assert compiles == "compiles"


def test_nan_logits_end_in_one_line(folder: Path) -> None:
    model = load_base(folder, "float32").model
    model.model.norm.weight = model.model.norm.weight * float("nan")
    with pytest.raises(ModelError, match="the model's logits are not finite numbers"):
        Generator(model, Bytes(), 320).answer(Prompt((1, 2, 3), None), GREEDY)


@pytest.mark.parametrize("max_new_tokens", [1, 24])
def test_nan_logits_of_one_prompt_in_a_batch_end_in_one_line(
    folder: Path, max_new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts run one by one only for an architecture that mlx-lm cannot batch.
    monkeypatch.setattr(Generator, "answer", None)
    model = load_base(folder, "float32").model
    model.model.embed_tokens.weight[7] = float("nan")
    prompts = [Prompt((1, 2, 3), None), Prompt((1, 7, 3), None)]
    with pytest.raises(ModelError, match="the model's logits are not finite numbers"):
        answer_prompts(model, Bytes(), prompts, Sampling(max_new_tokens=max_new_tokens))
