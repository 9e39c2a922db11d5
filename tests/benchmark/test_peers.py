"""mlx-lm as a contestant of a benchmark, against mlx-lm's own trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss, iterate_batches
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.models.loading import load_base, open_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.benchmark.peers import MlxLm, has_one_span, masked_loss, write_start
from mlxtune.config import TrainConfig
from mlxtune.core.data.encode import Example
from tests.long.counts import count_steps
from tests.long.peer_graphs import MlxLmGraphs
from tests.models import VOCAB_SIZE, write_model

MAX_SEQ_LEN = 70
# (length, first supervised, last supervised); the last is as long as an example may be.
SHAPES = [(9, 3, 8), (33, 20, 32), (40, 5, 38), (MAX_SEQ_LEN, 60, MAX_SEQ_LEN - 1)]


def examples(shapes: list[tuple[int, int, int]] = SHAPES) -> list[Example]:
    rng = np.random.default_rng(0)
    made = []
    for row, (length, first, last) in enumerate(shapes, 1):
        mask = np.zeros(length, dtype=np.uint8)
        mask[first : last + 1] = 1
        tokens = rng.integers(10, VOCAB_SIZE, length, dtype=np.int32)
        made.append(Example(row, tokens, mask))
    return made


def two_spans() -> list[Example]:
    made = examples()
    made[2].assistant_mask[15:20] = 0
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("peers") / "tiny", "qwen3")


def options(folder: Path, **changes: Any) -> TrainConfig:
    fields = {"model_path": str(folder), "data": "x", "dtype": "float32", "rank": 4, "alpha": 8}
    own = {"max_seq_len": MAX_SEQ_LEN, "lr": 1e-2, "max_grad_norm": 0, "schedule": "constant"}
    return TrainConfig(**fields | own | changes)


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    written = tmp_path / "adapter"
    write_start(open_base(folder, "auto"), options(folder).pipeline_config(), written)
    return written


def started(folder: Path, adapter: Path, steps: list[list[Example]]) -> MlxLm:
    trainer = MlxLm(folder, options(folder))
    trainer.start(adapter, steps)
    return trainer


def own_batch(chosen: list[Example]) -> tuple[mx.array, mx.array]:
    dataset = [
        (each.tokens.tolist(), int(each.assistant_mask.argmax()))
        for each in sorted(chosen, key=len)
    ]
    return next(iterate_batches(dataset, len(dataset), MAX_SEQ_LEN))


def test_spans_end_at_the_last_supervised_token(folder: Path, adapter: Path) -> None:
    _, spans, count = started(folder, adapter, [examples()]).batch(examples())
    assert spans.tolist() == [[first, last] for _, first, last in SHAPES]
    assert count == sum(example.supervised for example in examples())


@pytest.mark.parametrize(
    ("mask", "one"), [("0011", True), ("0110", True), ("1", True), ("0101", False), ("000", False)]
)
def test_span_is_one_stretch_of_supervised_tokens(mask: str, one: bool) -> None:
    supervised = np.array([int(digit) for digit in mask], dtype=np.uint8)
    assert has_one_span(Example(1, np.arange(len(mask), dtype=np.int32), supervised)) is one


def test_loss_with_pad_targets_is_mlx_lms_own(folder: Path, adapter: Path) -> None:
    chosen = examples()[:3]
    model, _ = load_model(folder)
    load_adapters(model, str(adapter))
    loss, count = default_loss(model, *own_batch(chosen))
    # One padding token a row, and in the third row the token after the last supervised token.
    assert int(count) == sum(each.supervised for each in chosen) + 3 + 1
    assert started(folder, adapter, [chosen]).warm_up([chosen]) == pytest.approx(
        float(loss), rel=1e-6
    )


@pytest.mark.parametrize("chosen", [examples(), two_spans()], ids=["default", "masked"])
def test_step_loss_covers_the_supervised_tokens(
    folder: Path, adapter: Path, chosen: list[Example]
) -> None:
    trainer = started(folder, adapter, [chosen])
    loss = trainer.step(1, chosen)
    model, _ = load_model(folder)
    summed = 0.0
    for each in chosen:
        logits = model(mx.array(each.tokens[None, :-1]))
        losses = nn.losses.cross_entropy(logits, mx.array(each.tokens[None, 1:]))
        summed += float((losses * mx.array(each.assistant_mask[None, 1:])).sum())
    assert loss == pytest.approx(summed / sum(each.supervised for each in chosen), rel=1e-5)
    run = 4 * (MAX_SEQ_LEN - 1)
    assert trainer.token_counts(chosen) == (run, run - sum(last for _, _, last in SHAPES))
    assert trainer.loss_function == ("masked" if chosen[2].assistant_mask[16] == 0 else "default")


def test_masked_loss_is_mlx_lms_where_both_can_say_the_same(folder: Path, adapter: Path) -> None:
    model, _ = load_model(folder)
    trainer = started(folder, adapter, [examples()])
    tokens, spans, _ = trainer.batch(examples())
    trainer.loss_function = "masked"
    _, mask, _ = trainer.batch(examples())
    by_span, by_mask = default_loss(model, tokens, spans), masked_loss(model, tokens, mask)
    assert [float(x) for x in by_mask] == pytest.approx([float(x) for x in by_span], rel=1e-6)


def test_warm_up_takes_no_step(folder: Path, adapter: Path) -> None:
    chosen = examples()
    cold, warm = (started(folder, adapter, [chosen]) for _ in range(2))
    warm.warm_up([chosen])
    losses = [[trainer.step(n, chosen) for n in (1, 2, 3)] for trainer in (cold, warm)]
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]


@pytest.mark.skipif(on_cpu(), reason="the CPU takes a minute of g++ to compile a step")
def test_compiled_step_matches_the_plain_step(
    folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = examples()
    compiled = started(folder, adapter, [chosen])
    compiled.warm_up([chosen])
    monkeypatch.setattr("mlxtune.benchmark.peers.on_cpu", lambda: True)
    plain = started(folder, adapter, [chosen])
    losses = [[trainer.step(n, chosen) for n in (1, 2, 3)] for trainer in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_our_steps_have_the_losses_of_theirs(folder: Path, adapter: Path) -> None:
    steps = [examples(), two_spans()[1:], examples()[::-1], examples()[:2]]
    config = options(folder)
    pipeline = InstructPipeline(load_base(folder, "float32").model, config.pipeline_config())
    pipeline.load(adapter)
    trainer = started(folder, adapter, steps)
    for number, chosen in enumerate(steps, 1):
        ours = pipeline.train_batch(chosen, step=number, learning_rate=config.lr).avg_loss
        assert trainer.step(number, chosen) == pytest.approx(ours, rel=1e-4)


def test_start_is_the_adapter_that_a_pipeline_begins_with(
    folder: Path, adapter: Path, tmp_path: Path
) -> None:
    pipeline = InstructPipeline(
        load_base(folder, "float32").model, options(folder).pipeline_config()
    )
    pipeline.snapshot()(tmp_path)
    assert (tmp_path / "adapters.safetensors").read_bytes() == (
        adapter / "adapters.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peer_stores_and_computes_in_the_given_dtype(tmp_path: Path, dtype: str) -> None:
    half = write_model(tmp_path / "half", "qwen3", dtype="bfloat16")
    model = MlxLm(half, options(half, dtype=dtype))._model
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {getattr(mx, dtype)}
    assert model(mx.array([[1, 2]])).dtype == getattr(mx, dtype)


def test_products_run_on_padding_and_the_head_on_all(
    folder: Path, adapter: Path, tmp_path: Path
) -> None:
    trainer = started(folder, adapter, [examples()])
    before = [trainer.step(1, examples())]
    found = count_steps(MlxLmGraphs(trainer), [examples()] * 2)
    padded_tokens = trainer.token_counts(examples())[0]
    hidden, inner, heads, kv_heads, width, rank = 64, 96, 4, 2, 16, 4  # of tests/models.py
    layers = len(load_model(folder, lazy=True)[0].layers)
    layer = hidden * width * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    outputs = width * (heads + kv_heads)
    attention_inputs = hidden * width * (heads + 2 * kv_heads)
    own = hidden * VOCAB_SIZE * 2 + layers * layer * 2 - attention_inputs
    lora = layers * rank * 3 * (2 * hidden + outputs) - rank * 2 * hidden
    assert found.matmul_flops == 2 * 2 * padded_tokens * (own + lora)
    assert found.launches.total() > 0
    # Counting took no step, so the next step is still the second.
    other = started(folder, adapter, [examples()])
    assert before == [other.step(1, examples())]
    assert trainer.step(2, examples()) == other.step(2, examples())
