"""A pipeline's loss, gradients and updates, against their formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.step.step_loss import StepLoss
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.errors import NonFiniteLossError
from tests.backend.conftest import MakePipeline, fill_lora_b, random_examples
from tests.backend.step.executions import gradients_of
from tests.models import VOCAB_SIZE, write_model
from tests.slow import slow

ARCHITECTURES = ("qwen3", "llama", "gemma2", "gemma3_text")


def reference(
    pipeline: InstructPipeline, folder: Path, examples: list[Example]
) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
    """Return loss and gradients of dense weights W + scale (A B)^T, one example at a time.

    Uses no padding, no LoRA layers and no mlxtune code: only mlx-lm's own model, an explicit
    log-softmax, and the sum over supervised tokens divided by their number.
    """
    model = load_base(folder, "float32").model
    scale = pipeline.config.lora_alpha / pipeline.config.lora_rank
    adapters = dict(tree_flatten(pipeline.model.trainable_parameters()))
    dense = dict(tree_flatten(model.parameters()))
    names = [name.removesuffix(".lora_a") for name in adapters if name.endswith(".lora_a")]
    count = sum(int(example.assistant_mask[1:].sum()) for example in examples)

    def loss(adapters: dict[str, mx.array], tokens: mx.array, mask: mx.array) -> mx.array:
        merged = [
            (
                f"{name}.weight",
                dense[f"{name}.weight"]
                + scale * (adapters[f"{name}.lora_a"] @ adapters[f"{name}.lora_b"]).T,
            )
            for name in names
        ]
        model.update(tree_unflatten(merged))
        logits = model(tokens[None])[0, :-1]
        log_probabilities = logits - mx.log(mx.exp(logits).sum(-1, keepdims=True))
        picked = log_probabilities[mx.arange(len(tokens) - 1), tokens[1:]]
        return -(picked * mask[1:]).sum() / count

    total, gradients = 0.0, {name: np.zeros(value.shape) for name, value in adapters.items()}
    for example in examples:
        mask = mx.array(example.assistant_mask.astype(np.float32))
        part, parts = mx.value_and_grad(loss)(adapters, mx.array(example.tokens), mask)
        total += part.item()
        for name, value in parts.items():
            gradients[name] += np.array(value)
    return total, gradients


def assert_same_gradients(
    found: dict[str, Any], expected: dict[str, np.ndarray[Any, Any]], tolerance: float = 1e-4
) -> None:
    flat = {name: np.array(value) for name, value in tree_flatten(found)}
    assert flat.keys() == expected.keys()
    largest = max(np.abs(value).max() for value in expected.values())
    assert largest > 1e-3
    for name, value in expected.items():
        assert np.abs(flat[name] - value).max() <= tolerance * largest, name


@pytest.mark.parametrize(
    ("architecture", "micro_batch_tokens"),
    [
        *((architecture, 100) for architecture in ARCHITECTURES),
        *((ARCHITECTURES[0], tokens) for tokens in (1, 10_000)),
        *(slow(architecture, 1) for architecture in ARCHITECTURES[1:]),
    ],
)
def test_loss_and_gradients_equal_the_formula(
    make_pipeline: MakePipeline, tmp_path: Path, architecture: str, micro_batch_tokens: int
) -> None:
    pipeline = make_pipeline(architecture, micro_batch_tokens=micro_batch_tokens, targets=("all",))
    examples = random_examples()

    result = pipeline.loss_and_gradients(examples)

    expected, expected_gradients = reference(pipeline, tmp_path / f"{architecture}-None", examples)
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert_same_gradients(result.gradients, expected_gradients)


def test_evaluation_equals_the_formula_and_is_weighted_by_tokens(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    pipeline = make_pipeline("qwen3", micro_batch_tokens=50)
    examples = random_examples(9)

    result = pipeline.evaluate(examples)

    expected, _ = reference(pipeline, tmp_path / "qwen3-None", examples)
    assert result.avg_loss == pytest.approx(expected, rel=1e-5)
    assert result.total_response_tokens == sum(e.supervised for e in examples)
    assert result.perplexity == pytest.approx(np.exp(expected), rel=1e-4)


def at_the_edges() -> list[Example]:
    """Return examples supervised at the first token, the last, both, or throughout."""
    masks = {
        "first": [1, 0, 0, 1, 0, 0],
        "last": [0, 0, 0, 0, 0, 1],
        "both": [1, 0, 0, 0, 0, 1],
        "all": [1, 1, 1, 1, 1, 1],
        "two tokens": [1, 1],
        "same beginning": [1, 1, 1, 1, 0, 0],
    }
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCAB_SIZE, 6)
    return [
        Example(row, shared[: len(mask)].astype(np.int32), np.array(mask, dtype=np.uint8))
        if row % 2
        else Example(row, rng.integers(0, VOCAB_SIZE, len(mask)).astype(np.int32), np.uint8(mask))
        for row, mask in enumerate(masks.values())
    ]


def test_examples_that_predict_nothing_are_an_error(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline("qwen3")
    examples = [Example(1, np.array([1, 2, 3], dtype=np.int32), np.array([1, 0, 0], np.uint8))]
    for use in (pipeline.evaluate, pipeline.train_batch):
        with pytest.raises(ValueError, match="no example has a supervised token after its first"):
            use(examples)


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_first_token_is_not_counted_as_predicted(
    make_pipeline: MakePipeline, tmp_path: Path, micro_batch_tokens: int
) -> None:
    """Rows of `text` without BOS supervise their first token."""
    pipeline = make_pipeline("qwen3", micro_batch_tokens=micro_batch_tokens)
    examples = at_the_edges()
    predicted = [1, 1, 1, 5, 1, 3]

    result = pipeline.loss_and_gradients(examples)
    expected, expected_gradients = reference(pipeline, tmp_path / "qwen3-None", examples)
    assert result.tokens == sum(predicted)
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert_same_gradients(result.gradients, expected_gradients)

    evaluated, step = pipeline.evaluate(examples), pipeline.train_batch(examples)
    assert evaluated.total_response_tokens == step.total_response_tokens == sum(predicted)
    assert evaluated.avg_loss == pytest.approx(expected, rel=1e-5)
    assert step.avg_loss == pytest.approx(expected, rel=1e-5)
    # Examples run up to their last supervised token, and a packed sequence runs a shared prefix
    # once.
    beginnings = {
        tuple(one.tokens[: i + 1].tolist())
        for one, run in zip(examples, [3, 5, 5, 5, 1, 3], strict=True)
        for i in range(run)
    }
    packed = micro_batch_tokens > 1
    assert step.run_tokens == (len(beginnings) if packed else sum([3, 5, 5, 5, 1, 3]))
    for example, count in zip(examples, predicted, strict=True):
        assert pipeline.evaluate([example]).total_response_tokens == count


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quantize", [None, 4])
def test_splitting_a_step_changes_neither_loss_nor_gradient(
    make_pipeline: MakePipeline, dropout: float, quantize: int | None
) -> None:
    examples = random_examples(6)
    whole = make_pipeline("gemma3_text", quantize=quantize, dropout=dropout)
    split = make_pipeline("gemma3_text", quantize=quantize, dropout=dropout, micro_batch_tokens=30)

    expected = whole.loss_and_gradients(examples, step=3)
    found = split.loss_and_gradients(examples[::-1], step=3)

    assert found.counts.micro_batches > expected.counts.micro_batches
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.tokens == expected.tokens
    assert_same_gradients(
        found.gradients,
        {name: np.array(value) for name, value in tree_flatten(expected.gradients)},
    )


def test_dropout_depends_only_on_seed_step_and_row(make_pipeline: MakePipeline) -> None:
    examples = random_examples(3)

    def loss(step: int, seed: int = 42, dropout: float = 0.5) -> float:
        pipeline = make_pipeline("qwen3", dropout=dropout, seed=seed)
        pipeline.loss_and_gradients(examples, step=step + 1)  # earlier steps must not matter
        return pipeline.loss_and_gradients(examples, step=step).loss

    assert loss(1) == loss(1)
    assert len({loss(1), loss(2), loss(1, seed=43), loss(1, dropout=0.0)}) == 4


def test_each_step_draws_the_dropout_of_its_number(make_pipeline: MakePipeline) -> None:
    examples = random_examples(3)

    def first_loss(step: int) -> float:
        pipeline = make_pipeline("qwen3", dropout=0.5)
        return pipeline.train_batch(examples, step=step, learning_rate=1e-3).avg_loss

    drawn = make_pipeline("qwen3", dropout=0.5)
    expected = [drawn.loss_and_gradients(examples, step=step).loss for step in (1, 2, 3)]
    assert [first_loss(step) for step in (1, 2, 3)] == expected
    assert first_loss(2) == first_loss(2)
    assert len(set(expected)) == 3


def test_steps_without_a_number_count_from_1(make_pipeline: MakePipeline) -> None:
    """The learning rate is 0, so that steps differ only by their dropout."""
    examples = random_examples(3)
    pipeline = make_pipeline("qwen3", dropout=0.5)
    expected = [pipeline.loss_and_gradients(examples, step=step).loss for step in (1, 2, 8, 9)]
    found = [pipeline.train_batch(examples, learning_rate=0.0).avg_loss for _ in range(2)]
    found.append(pipeline.train_batch(examples, step=8, learning_rate=0.0).avg_loss)
    found.append(pipeline.train_batch(examples, learning_rate=0.0).avg_loss)
    assert found == expected
    assert len(set(found)) == 4


def test_each_row_draws_its_own_dropout(make_pipeline: MakePipeline) -> None:
    """Equal rows get different dropout, and the examples of one row get the same."""
    one = random_examples(1)[0]
    pipeline = make_pipeline("qwen3", dropout=0.5)

    def loss(*rows: int) -> float:
        return pipeline.loss_and_gradients([replace(one, row=row) for row in rows]).loss

    assert loss(1) != loss(2)
    assert loss(1, 2) == pytest.approx((loss(1) + loss(2)) / 2, rel=1e-5)
    assert loss(1, 1) == pytest.approx(loss(1), rel=1e-6)


def test_evaluation_has_no_dropout(make_pipeline: MakePipeline) -> None:
    examples = random_examples(3)
    pipeline = make_pipeline("qwen3", dropout=0.5)
    pipeline.loss_and_gradients(examples)
    without = make_pipeline("qwen3")
    assert pipeline.evaluate(examples).avg_loss == without.evaluate(examples).avg_loss


def test_validation_after_a_step_runs_the_model_in_evaluation_mode(
    make_pipeline: MakePipeline,
) -> None:
    examples = random_examples(3)
    pipeline = make_pipeline("qwen3")
    expected = pipeline.evaluate(examples).avg_loss
    backbone = pipeline.model.model
    backbone.norm = nn.Sequential(backbone.norm, nn.Dropout(0.5))

    pipeline.loss_and_gradients(examples)

    assert pipeline.evaluate(examples).avg_loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("quantize", [None, 4])
def test_nothing_but_the_lora_matrices_changes(
    make_pipeline: MakePipeline, quantize: int | None
) -> None:
    pipeline = make_pipeline("gemma2", quantize=quantize)
    before = {
        name: np.array(value.view(mx.uint8))
        for name, value in tree_flatten(pipeline.model.parameters())
    }

    for step in (1, 2, 3):
        pipeline.train_batch(random_examples(3, seed=step), step=step, learning_rate=1e-2)

    after = dict(tree_flatten(pipeline.model.parameters()))
    changed = {
        name for name in before if not np.array_equal(before[name], after[name].view(mx.uint8))
    }
    assert after.keys() == before.keys()
    assert changed == {name for name in before if name.endswith(("lora_a", "lora_b"))}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_float32_lora_matrices_and_gradients(
    make_pipeline: MakePipeline, dtype: str
) -> None:
    pipeline = make_pipeline("qwen3", dtype=dtype)
    full = make_pipeline("qwen3")
    examples = random_examples(3)

    result = pipeline.loss_and_gradients(examples)
    loss, gradients = result.loss, result.gradients

    assert {value.dtype for _, value in tree_flatten(gradients)} == {mx.float32}
    assert {value.dtype for _, value in tree_flatten(pipeline.model.trainable_parameters())} == {
        mx.float32
    }
    assert pipeline.model(mx.array([[1, 2, 3]])).dtype == getattr(mx, dtype)
    assert loss == pytest.approx(full.loss_and_gradients(examples).loss, rel=2e-2)


def test_gradients_of_a_float16_model_do_not_underflow(tmp_path: Path) -> None:
    """A small final norm makes the gradients of tokens as small as in a large model."""
    folder = write_model(tmp_path / "model", "qwen3", dtype="float16")
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] *= 2e-3
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    examples = random_examples(30)

    def gradients(dtype: str) -> dict[str, np.ndarray[Any, Any]]:
        model = load_base(folder, dtype).model
        pipeline = InstructPipeline(model, InstructConfig(lora_rank=4, targets=("all",)))
        fill_lora_b(pipeline)
        found = pipeline.loss_and_gradients(examples)
        assert all(value.dtype == mx.float32 for _, value in tree_flatten(found.gradients))
        return gradients_of(found.gradients)

    wanted = gradients("float32")
    for name, found in gradients("float16").items():
        error = np.linalg.norm(found - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < 0.01, name


def test_step_that_is_not_finite_is_an_error_and_changes_nothing(
    make_pipeline: MakePipeline,
) -> None:
    pipeline = make_pipeline("qwen3")
    name = "model.layers.0.self_attn.v_proj.lora_a"
    value = dict(tree_flatten(pipeline.model.trainable_parameters()))[name]
    pipeline.model.update(tree_unflatten([(name, mx.full(value.shape, 3e38))]))
    before = dict(tree_flatten(pipeline.model.trainable_parameters()))

    with pytest.raises(NonFiniteLossError, match=r"step 7: .* at learning rate 0\.5"):
        pipeline.train_batch(random_examples(2), step=7, learning_rate=0.5)

    for name, value in tree_flatten(pipeline.model.trainable_parameters()):
        assert mx.array_equal(value, before[name]), name


def test_infinite_gradient_norm_raises_and_leaves_state_unchanged(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline("qwen3")
    before = dict(tree_flatten(pipeline.model.trainable_parameters()))
    vectors = pipeline._engine.vectors.join(tree_unflatten(list(before.items())))
    gradients = [mx.full(vector.shape, 1e30) for vector in vectors]
    monkeypatch.setattr(pipeline._engine.vectors, "join_gradients", lambda _: gradients)

    with pytest.raises(NonFiniteLossError, match="gradient norm is inf"):
        pipeline.train_batch(random_examples(2), step=1, learning_rate=0.5)

    for name, value in tree_flatten(pipeline.model.trainable_parameters()):
        assert mx.array_equal(value, before[name]), name


def test_infinite_loss_of_finite_gradients_is_an_error_and_changes_nothing(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline("qwen3")
    before = dict(tree_flatten(pipeline.model.trainable_parameters()))
    monkeypatch.setattr(StepLoss, "known_loss", float("inf"))

    with pytest.raises(NonFiniteLossError, match="loss is inf"):
        pipeline.train_batch(random_examples(2), step=1, learning_rate=0.5)

    for name, value in tree_flatten(pipeline.model.trainable_parameters()):
        assert mx.array_equal(value, before[name]), name


def test_train_step_learns_one_example(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline("qwen3", learning_rate=1e-2)
    example = random_examples(1)[0]
    first = pipeline.train_step(example)
    for _ in range(5):
        last = pipeline.train_step(example)
    assert first.num_response_tokens == example.supervised
    assert last.loss < first.loss


def test_losses_of_a_real_model_equal_the_golden_ones(shared: Path) -> None:
    """golden.json holds mean losses of texts after BOS, from another implementation."""
    import json

    from mlxtune.backend.text.tokenizer import load_tokenizer

    folder = shared / "models" / "stories260k"
    pipeline = InstructPipeline(load_base(folder, "float32").model, InstructConfig())
    tokenizer = load_tokenizer(folder)
    golden = json.loads((folder / "golden.json").read_text())["nll_mean"]
    assert golden
    for text, (loss, count) in golden.items():
        ids = [tokenizer.bos_id, *tokenizer.encode_batch([text])[0].ids]
        mask = np.array([0] + [1] * (len(ids) - 1), dtype=np.uint8)
        result = pipeline.evaluate([Example(1, np.array(ids, dtype=np.int32), mask)])
        assert result.total_response_tokens == count
        assert result.avg_loss == pytest.approx(loss, rel=1e-4)


def test_reference_of_a_run_has_only_what_decides_its_log_probabilities(model: Path) -> None:
    facts = {"base_hash": "abc", "dtype": "float32", "quantized_compute": None}
    base = {"base": {"size": 1}, "quantize": "4", "double_quant": False}
    described = {"chat_template": "def", "prompt": {"template": "x"}, "trained_rows": {"rows": 2}}
    pipeline = InstructPipeline(
        load_base(model, "float32").model,
        InstructConfig(),
        base_record=base | described | {"an entry of a later version": True},
        provenance=lambda: facts | {"versions": {"mlx": "1"}, "working_directory": "."},
    )
    # The key of reference.json is a hash of this JSON, so runs need it unchanged to resume.
    assert json.dumps(pipeline.reference()) == (
        '{"base_hash": "abc", "dtype": "float32", "quantized_compute": null, "base": {"base": '
        '{"size": 1}, "quantize": "4", "double_quant": false}, "adapter": null, "lora": {}}'
    )


def test_pipeline_implements_the_protocol_of_the_trainer(make_pipeline: MakePipeline) -> None:
    from mlxtune.core.training.pipeline import Pipeline

    pipeline: Pipeline = make_pipeline("qwen3")
    assert isinstance(pipeline.model, nn.Module)  # type: ignore[attr-defined]
    assert pipeline.describe()["lora_rank"] == 4
