"""Measure a step of grpo: its training against repeated prompts, its sampling against mlx-lm's.

    python -m tests.long.reward_costs [--rounds N] [--tiny]

Prompts share their first part, and each gets several answers. Prints JSON with the seconds of each
round and the peak of memory in bytes; contestants take turns.

    training    `packed` as mlxtune trains, `padded` with each prompt repeated for its answers;
                in micro-batches of 2,048 tokens, and with the whole step as one micro-batch
    sampling    `ours` and mlx-lm's `batch_generate`, the same number of answers to `shared`
                prompts and to prompts of their `own`

The model has the small shape of `bench_table`, random weights, float32, and Qwen3's tokenizer from
the material next to the repository. `--tiny` has a tiny one.

Results: docs/rewards.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.generate import batch_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_tokenizer

from mlxtune.backend.models.loading import BaseModel, load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.text.sampling import sample
from mlxtune.config import InstructConfig
from mlxtune.config.objective_config import PolicyConfig
from mlxtune.core.objectives.policy import PolicyObjective, SampledExample, SampleRequest
from mlxtune.core.steps.execution import Execution
from tests.long import bench_table
from tests.long.gpu_material import write_model
from tests.models import write_model as write_tiny_model
from tests.paths import SHARED

# More tokens than any step has, and a cost of a micro-batch that no padding exceeds.
_NO_LIMIT = 2**30


@dataclass(frozen=True)
class Size:
    """The sizes of a step: `common` of a prompt's tokens are the same in all prompts."""

    prompts: int = 8
    answers: int = 8
    prompt: int = 200
    common: int = 120
    tokens: int = 64
    vocabulary: int = 150_000


TINY = Size(prompts=2, answers=2, prompt=12, common=6, tokens=4, vocabulary=200)


def measure(base: BaseModel, folder: Path, size: Size, rounds: int) -> dict[str, Any]:
    """Return the figures of sampling and, after LoRA is applied, of training."""
    sampling = {
        "shared": _sampling(base, folder, size, prompts_of(size, size.prompts, size.answers)),
        "own": _sampling(base, folder, size, prompts_of(size, size.prompts * size.answers, 1)),
    }
    sampled = {name: in_turn(contestants, rounds) for name, contestants in sampling.items()}
    return {"sampling": sampled, "training": in_turn(_training(base, size), rounds)}


def in_turn(
    contestants: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Run each contestant once, then for some rounds; return their seconds and peaks."""
    results: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            mx.clear_cache()
            mx.reset_peak_memory()
            started = time.perf_counter()
            run()
            if number:
                results[name]["seconds"].append(round(time.perf_counter() - started, 3))
            results[name]["peak"] = mx.get_peak_memory()
    return results


def prompts_of(size: Size, count: int, repeats: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    common = rng.integers(0, size.vocabulary, size.common).tolist()
    own = rng.integers(0, size.vocabulary, (count, size.prompt - size.common)).tolist()
    return [common + each for each in own for _ in range(repeats)]


def _sampling(
    base: BaseModel, folder: Path, size: Size, prompts: list[list[int]]
) -> dict[str, Callable[[], object]]:
    tokenizer = load_tokenizer(folder)
    requests = [SampleRequest(tuple(each), (number,)) for number, each in enumerate(prompts)]
    return {
        "ours": lambda: sample(
            base.model,
            requests,
            Sampling(size.tokens, temperature=1.0),
            frozenset(tokenizer.eos_token_ids),
        ),
        "batch_generate": lambda: batch_generate(
            base.model, tokenizer, prompts, max_tokens=size.tokens, sampler=make_sampler(temp=1.0)
        ),
    }


def _training(base: BaseModel, size: Size) -> dict[str, Callable[[], object]]:
    rng, examples = np.random.default_rng(1), []
    for number, prompt in enumerate(prompts_of(size, size.prompts, size.answers)):
        length = int(rng.integers(size.tokens // 4, size.tokens + 1))
        answer = rng.integers(0, size.vocabulary, length)
        mask = np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), length])
        examples.append(
            SampledExample(
                row=number // size.answers,
                tokens=np.array([*prompt, *answer], dtype=np.int32),
                assistant_mask=mask,
                advantage=float(rng.normal()),
                logps=np.full(length, -np.log(size.vocabulary), dtype=np.float32),
            )
        )
    config = InstructConfig(targets=("all",), rank=8, lr=1e-5)
    pipeline = InstructPipeline(base.model, config, objective=PolicyObjective(PolicyConfig()))

    def train(execution: Execution) -> None:
        pipeline.run_as(execution)
        pipeline.train_batch(examples)

    limited = pipeline.forward.execution
    at_once = replace(limited, micro_batch_tokens=_NO_LIMIT, fixed_cost=_NO_LIMIT)
    executions = {
        f"{name}{suffix}": replace(execution, packs=packs)
        for suffix, execution in {"": limited, " at once": at_once}.items()
        for name, packs in {"packed": True, "padded": False}.items()
    }
    return {name: partial(train, execution) for name, execution in executions.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxtune-reward-costs-") as name:
        folder = Path(name) / "model"
        if options.tiny:
            write_tiny_model(folder, "qwen3")
        else:
            write_model(folder, bench_table.SHAPES["small"], None, SHARED)
        size = TINY if options.tiny else Size()
        print(json.dumps(measure(load_base(folder, "float32"), folder, size, options.rounds)))


if __name__ == "__main__":
    main()
