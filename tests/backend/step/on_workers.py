"""Script for test_workers.py: check that several workers compute the same steps as one.

python -m tests.backend.step.on_workers [all]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np

from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.workers.workers import Workers
from mlxtune.config import DataConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.core.training.requests import RequestExchange, Requests
from mlxtune.errors import WorkerError
from mlxtune.session.dataset import load_dataset
from mlxtune.session.reader import Reader
from tests.backend.step import on_sharded_workers
from tests.backend.step.executions import (
    WAYS,
    assert_same,
    computed,
    fixed_step,
    fresh,
    gradients_of,
    model_folder,
)
from tests.backend.step.preferences import objective_of, rows_of
from tests.paths import SHARED

# Execution, bits of quantisation, and options.
CASES = {
    "packed": ("packed", None, {}),
    "by the CPU's kernels": ("cpu kernels, packed", None, {}),
    "with dropout, padded": ("split head", None, {"dropout": 0.3}),
    "quantised, recomputed": ("packed with recompute", 4, {}),
}
FEW = ("packed", "quantised, recomputed")
if find_spec("numba") is None:  # a Mac has no numba
    del CASES["by the CPU's kernels"]


def check_step(
    workers: Workers, how: str, folder: Path, step: Sequence[Example], **config: object
) -> None:
    """Compare loss, gradients, an update and an evaluation with a single worker's."""
    together, alone = (
        fresh(folder, WAYS[how], 64, workers=each, **config) for each in (workers, Workers())
    )
    # The step of one example leaves all workers but one without work.
    for examples in (step, step[1:2]):
        assert_same(computed(together, examples), computed(alone, examples))
    results = [each.train_batch(step, step=1) for each in (together, alone)]
    assert results[0].total_tokens == results[1].total_tokens
    assert results[0].run_tokens >= results[1].run_tokens > 0
    np.testing.assert_allclose(results[0].grad_norm or 0, results[1].grad_norm or 0, rtol=1e-4)
    losses = [each.evaluate(step).avg_loss for each in (together, alone)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    _check_equal_on_all(workers, together)


def check_preferences(workers: Workers) -> None:
    """Compare steps of preferences, including their metrics, with a single worker's."""
    for name, options in OBJECTIVES:
        objective = objective_of(name, **options)
        together, alone = (
            fresh(model_folder("qwen3"), WAYS["packed"], 64, workers=each, objective=objective)
            for each in (workers, Workers())
        )
        step = rows_of(objective)
        assert_same(computed(together, step), computed(alone, step))
        found, wanted = (each.train_batch(step, step=2).metrics for each in (together, alone))
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5)


# A loss of single rows, a loss across rows, and a loss with a divergence.
OBJECTIVES: list[tuple[str, dict[str, object]]] = [
    ("dpo", {}),
    ("dpo", {"dpo_loss": "aot"}),
    ("kto", {}),
]


def _check_equal_on_all(workers: Workers, pipeline: InstructPipeline) -> None:
    values = gradients_of(pipeline.model.trainable_parameters()).values()
    texts = workers.all_gather_text(str([value.tobytes().hex()[:64] for value in values]))
    assert len(texts) == workers.world_size
    assert len(set(texts)) == 1


def real_step(folder: Path) -> list[Example]:
    """Return the examples of four rows of real data, for a real model."""
    with (SHARED / "chat" / "wikisql_train.jsonl").open("rb") as lines:
        rows = list(islice(lines, 4))
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "chat.jsonl"
        data.write_bytes(b"".join(rows))
        config = DataConfig(str(folder), (str(data),), template="gemma", no_cache=True)
        corpus = load_dataset(config, Reader(config, folder)).corpus
    return [example for i in range(len(rows)) for example in corpus.row(i)]


def check_words(workers: Workers) -> None:
    """Check the exchange of texts of unequal length, and of shares of work."""
    assert workers.all_gather_text("é" * workers.rank) == [
        "é" * worker for worker in range(workers.world_size)
    ]
    values = np.zeros(5)
    mine = workers.own_items([1.0] * 5)
    values[mine] = np.pi * np.array(mine) + 1e-12
    np.testing.assert_array_equal(workers.merge(values), np.pi * np.arange(5) + 1e-12)


def check_decisions(workers: Workers) -> None:
    """Check that all workers stop after the same step when one of them is interrupted."""
    pipeline = fresh(model_folder("qwen3"), WAYS["packed"], 64, workers=workers)
    last, exchange = workers.world_size - 1, RequestExchange(workers.world_size)
    decided = []
    for step in range(1, 6):
        started = pipeline.start_batch(
            fixed_step(), step=step, learning_rate=1e-2, requests=exchange.sent
        )
        outcome = pipeline.wait(started)
        outcome.result()
        exchange.receive(outcome.agreed)
        stop, save = step >= 2 and workers.rank == last, step == 1 and workers.rank == 0
        decided.append(exchange.exchange(Requests(stop, save)))
    assert decided == [(False, False), (False, True), (True, False), (True, False), (True, False)]


def check_unlike(workers: Workers) -> None:
    """Check that workers detect an adapter that differs on one of them."""
    pipeline = fresh(model_folder("qwen3"), WAYS["packed"], 64, workers=workers)
    if workers.rank == 1:
        tree = pipeline.model.trainable_parameters()
        pipeline.model.update(_changed(tree))
    try:
        pipeline.snapshot()
    except WorkerError as error:
        assert "the adapter of worker 1 differs" in str(error)
    else:
        raise AssertionError
    with tempfile.TemporaryDirectory() as scratch:
        if workers.rank == 0:
            pipeline.write(Path(scratch) / ADAPTER)
        # Only worker 0's folder has a checkpoint, which it sends to the others.
        pipeline.load(Path(scratch))
    pipeline.snapshot()


def _changed(tree: object) -> object:
    from mlx.utils import tree_map

    return tree_map(lambda value: value * 1.0000002, tree)


def main() -> None:
    workers = Workers.launched()
    assert workers.world_size > 1
    check_words(workers)
    every = sys.argv[1:] == ["all"]
    for name, (how, quantize, config) in CASES.items():
        if name not in FEW and not every:
            continue
        check_step(workers, how, model_folder("qwen3", quantize), fixed_step(), **config)
        print(f"worker {workers.rank}: {name}", flush=True)
    if SHARED.is_dir() and every:
        folder = SHARED / "models" / "stories260k"
        check_step(workers, "packed", folder, real_step(folder), dropout=0.1)
    check_preferences(workers)
    check_decisions(workers)
    check_unlike(workers)
    if not every:
        # In the same processes, because starting them takes as long as all checks above.
        on_sharded_workers.check_all(["qwen3"], few=True)
    print(f"worker {workers.rank}: done", flush=True)


if __name__ == "__main__":
    main()
