"""The losses of single examples on every fast path, against the model as mlx-lm runs it."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from mlxtune import TrainConfig, train
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import AdapterSwitch, load_adapted
from mlxtune.backend.cpu import CPU
from mlxtune.backend.device import allocator
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.evaluator import Evaluator, evaluation_memory, max_batch_tokens
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.workers.workers import Workers
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_terms import BatchLoad, load_of
from mlxtune.core.steps.micro_batch import BLOCK_EXAMPLES
from mlxtune.core.steps.pack import StepLengths
from mlxtune.errors import MemoryLimitError
from tests.backend.conftest import random_examples
from tests.backend.step.executions import WAYS, first_supervised, fixed_step, model_folder
from tests.backend.workers.test_workers import Group
from tests.long.counts import counted_evaluations
from tests.models import sums, write_chat
from tests.paths import DOCS
from tests.slow import slow

KERNELS = Execution(CPU)
H200: dict[str, Any] = json.loads((DOCS / "measured" / "h200-memory.json").read_text())


def plain(model: object, example: Example) -> float:
    """Return an example's summed cross-entropy in numpy, from all of mlx-lm's logits."""
    tokens, mask = example.tokens, example.assistant_mask[1:]
    logits = np.array(model(mx.array(tokens[None, :-1]))[0], dtype=np.float64)  # type: ignore[operator]
    highest = logits.max(axis=1)
    total = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    return float(((total - logits[np.arange(len(mask)), tokens[1:]]) * mask).sum())


def expected(model: object, examples: list[Example]) -> npt.NDArray[np.float64]:
    return np.array([plain(model, example) for example in examples])


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter that was trained on the tiny Qwen3."""
    folder = tmp_path_factory.mktemp("trained")
    rows = write_chat(folder / "chat.jsonl", sums(20))
    output = str(folder / "out" / "adapters.safetensors")
    options = {"lr": 1e-2, "targets": ("all",), "val_split": 0.0, "samples": 0, "quiet": True}
    train(TrainConfig(str(model_folder("qwen3")), str(rows), output=output, **options))  # type: ignore[arg-type]
    return folder / "out"


# Every way runs several micro-batches. Two ways also run one micro-batch for each example, and one
# micro-batch for all examples.
SIZED = [(way, 60) for way in WAYS]
SIZED += [(way, tokens) for way in ("split head", "all") for tokens in (1, 10_000)]


@pytest.mark.parametrize(("way", "tokens_at_once"), SIZED)
def test_loss_of_each_example_equals_full_logits(way: str, tokens_at_once: int) -> None:
    base = load_base(model_folder("qwen3"), "float32")
    examples = fixed_step()
    wanted = expected(base.model, examples)
    evaluator = Evaluator(
        base,
        pytest.fail,
        execution=replace(WAYS[way], micro_batch_tokens=tokens_at_once),
    )
    np.testing.assert_allclose(evaluator.losses(examples), wanted, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("way", [Execution(MLX), KERNELS], ids=["plain", "kernels"])
def test_loss_equals_full_logits_for_other_heads_and_windows(
    architecture: str, way: Execution
) -> None:
    base = load_base(model_folder(architecture), "float32")
    wanted = expected(base.model, fixed_step())
    evaluator = Evaluator(base, pytest.fail, execution=way)
    np.testing.assert_allclose(evaluator.losses(fixed_step()), wanted, rtol=1e-5)


def test_evaluator_runs_a_model_that_was_training_in_evaluation_mode() -> None:
    base = load_base(model_folder("qwen3"), "float32")
    examples = random_examples(3)
    wanted = expected(base.model, examples)
    base.model.model.norm = nn.Sequential(base.model.model.norm, nn.Dropout(0.5))
    base.model.train()

    evaluator = Evaluator(base, pytest.fail)

    np.testing.assert_allclose(evaluator.losses(examples), wanted, rtol=1e-4)


@pytest.mark.parametrize("way", [Execution(MLX), KERNELS], ids=["plain", "kernels"])
def test_base_and_adapted_are_both_evaluated_on_one_model(adapter: Path, way: Execution) -> None:
    examples, folder = fixed_step(), model_folder("qwen3")
    untouched = expected(load_base(folder, "float32").model, examples)
    adapted: AdapterSwitch = load_adapted(
        load_base(folder, "float32"), AdapterFile.find(str(adapter))
    )
    with_it = expected(adapted.model, examples)
    assert np.abs(with_it - untouched).max() > 0.1
    evaluator = Evaluator(adapted.base, pytest.fail, execution=way)
    for on, wanted in ((False, untouched), (True, with_it), (False, untouched)):
        adapted.use_adapter(on)
        np.testing.assert_allclose(evaluator.losses(examples), wanted, rtol=1e-5)


def test_closed_evaluator_leaves_base_and_adapted_as_they_were_loaded(adapter: Path) -> None:
    adapted = load_adapted(
        load_base(model_folder("qwen3"), "float32"), AdapterFile.find(str(adapter))
    )
    tokens = mx.array([[5, 9, 200, 33, 7]])
    with_it = adapted.model(tokens)
    adapted.use_adapter(False)
    without = adapted.model(tokens)
    adapted.use_adapter(True)
    with closing(Evaluator(adapted.base, pytest.fail, execution=KERNELS)) as evaluator:
        # Closing must also restore the adapter's modules, which are removed meanwhile.
        adapted.use_adapter(False)
        evaluator.losses(fixed_step())
    assert mx.array_equal(adapted.model(tokens), without)
    adapted.use_adapter(True)
    assert mx.array_equal(adapted.model(tokens), with_it)


@pytest.mark.parametrize("tokens_at_once", [slow(1), 10_000])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_supervised_first_token_has_no_loss(way: Execution, tokens_at_once: int) -> None:
    """Nothing predicts an example's first token, whether padded, packed or in a shared prefix."""
    base = load_base(model_folder("qwen3"), "float32")
    examples = [first_supervised(example) for example in fixed_step()]
    wanted = expected(base.model, examples)
    evaluator = Evaluator(
        base,
        pytest.fail,
        execution=replace(way, micro_batch_tokens=tokens_at_once),
    )
    np.testing.assert_allclose(evaluator.losses(examples), wanted, rtol=1e-5)
    np.testing.assert_allclose(evaluator.losses(fixed_step()), wanted, rtol=1e-5)


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}


def evaluator_of(
    way: Execution, tokens: int = 20, architecture: str = "qwen3", **overrides: Any
) -> Evaluator:
    folder = model_folder(architecture, overrides=tuple(overrides.items()))
    base = load_base(folder, "float32")
    execution = replace(way, micro_batch_tokens=tokens)
    return Evaluator(base, pytest.fail, execution=execution)


@pytest.mark.parametrize("way", ["packed with recompute", "split head in small chunks"])
def test_batch_is_evaluated_once(way: str) -> None:
    evaluator = evaluator_of(WAYS[way])
    batches = len(list(evaluator._losses.training.iterate(fixed_step())))
    assert batches > 1
    with counted_evaluations() as count:
        evaluator.losses(fixed_step())
    assert count[0] == batches


def test_batch_is_prepared_while_the_previous_one_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluator, events = evaluator_of(WAYS["packed"]), []

    def note(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def noted(*args: Any) -> Any:
            events.append(name)
            return whole(*args)

        monkeypatch.setattr(owner, name, noted)

    note(evaluator.forward, "losses")
    note(mx, "async_eval")
    note(mx, "eval")
    done: list[int] = []
    evaluator.losses(fixed_step(), done.append)
    assert len(done) > 1
    assert done == sorted(set(done))
    assert done[-1] == len(fixed_step())
    following = ["losses", "eval", "async_eval"] * (len(done) - 1)
    assert events == ["losses", "async_eval", *following, "eval"]


def estimate(evaluator: Evaluator, load: BatchLoad) -> int:
    memory = evaluation_memory(evaluator.forward)
    return memory.estimate(load, evaluator.forward.execution.loss_chunk)


def test_batches_are_as_large_as_the_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examples = random_examples(60)
    wanted = evaluator_of(WAYS["packed"]).losses(examples)
    monkeypatch.setattr("mlxtune.backend.step.evaluator.max_batch_tokens", lambda parameters: 16384)
    evaluator = evaluator_of(WAYS["packed"])
    sizes = []
    for free in (10**12, estimate(evaluator, BatchLoad(8, 40, 100, 320)), 0):
        monkeypatch.setattr(evaluator._losses, "_free_bytes", free)
        done: list[int] = []
        np.testing.assert_allclose(evaluator.losses(examples, done.append), wanted, rtol=1e-5)
        sizes.append(len(done))
        assert evaluator._losses.training.max_tokens == 20, "training's limit stays"
    assert sizes[0] == 1
    assert 1 < sizes[1] < sizes[2]


def test_max_batch_tokens_fit_one_gpu_second_or_ten_cpu_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for cpu in (True, False):
        monkeypatch.setattr("mlxtune.backend.step.evaluator.on_cpu", lambda cpu=cpu: cpu)
        found[cpu] = [max_batch_tokens(size) for size in (10**6, 600_000_000, 4 * 10**9)]
    # A token takes 2 FLOP per parameter; the limit is 10 TFLOP on a GPU, 1 TFLOP on the CPU.
    assert found == {True: [16384, 833, 125], False: [16384, 8333, 1250]}


def test_evaluation_remembers_the_batch_size_that_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxtune.backend.step.evaluator.max_batch_tokens", lambda parameters: 16384)
    evaluator, warnings = evaluator_of(WAYS["packed"]), []
    batches, whole, largest = evaluator._losses.training, evaluator.forward.losses, []
    evaluator._losses._runner._warn = warnings.append

    def limited(batch: Any, *rest: Any) -> mx.array:
        if batch.inputs.size > 40:
            raise RuntimeError("[malloc] Unable to allocate 78643200 bytes.")
        largest.append(batch.inputs.size)
        return whole(batch, *rest)

    monkeypatch.setattr(evaluator.forward, "losses", limited)
    for _ in range(2):
        evaluator.losses(fixed_step())
        assert len(warnings) <= 3
        warned = len(warnings)
    assert warned == len(warnings) > 0
    assert max(largest) > 20
    assert batches.max_tokens == 20


def test_worker_that_shares_the_model_neither_halves_nor_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other workers wait for it within the pass, and would sum other examples' values."""
    workers = Workers(Group(), tensor=True)
    execution = replace(WAYS["packed"], micro_batch_tokens=60)
    warnings: list[str] = []
    base = load_base(model_folder("qwen3"), "float32")
    evaluator = Evaluator(base, warnings.append, execution=execution, workers=workers)
    config = InstructConfig(lora_rank=2)
    pipeline = InstructPipeline(
        load_base(model_folder("qwen3"), "float32").model,
        config,
        execution=execution,
        workers=workers,
    )
    for made in (evaluator._losses, pipeline._engine.losses):
        tried: list[Any] = []

        def full(*given: Any, tried: list[Any] = tried) -> mx.array:
            tried.append(given)
            raise RuntimeError("[malloc] Unable to allocate 78643200 bytes.")

        monkeypatch.setattr(made._forward, "losses", full)
        with pytest.raises(MemoryLimitError, match="on this worker"):
            made.compute(fixed_step())
        assert len(tried) == 1
        assert made.training.max_tokens == 60
        assert warnings == []
    assert len(pipeline._engine.micro_batches.divided(StepLengths.of(fixed_step()))[0].examples) > 1
    assert pipeline.relieve_memory(fixed_step()) is None


def test_execution_is_chosen_by_the_dtype_of_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and evaluation choose alike: float32 kernels do not serve other dtypes."""
    asked: list[tuple[str, Any]] = []
    config = InstructConfig(lora_rank=2)

    def choose(parameters: int, dtype: str, kind: str = "auto", model: Any = None) -> Execution:
        asked.append((dtype, model))
        return Execution(MLX)

    for dtype in ("float32", "bfloat16"):
        base = load_base(model_folder("qwen3"), dtype)
        for module in ("evaluator", "pipeline"):
            monkeypatch.setattr(f"mlxtune.backend.step.{module}.best_execution", choose)
        Evaluator(base, pytest.fail).close()
        InstructPipeline(base.model, config)
        assert asked == [(dtype, base.model)] * 2
        asked.clear()


@pytest.mark.parametrize(
    ("architecture", "overrides"), [("qwen3", {}), slow("gemma2", {}), ("qwen3_moe", EXPERTS)]
)
def test_batch_takes_no_more_memory_than_expected(
    architecture: str, overrides: dict[str, Any]
) -> None:
    evaluator, examples, load = evaluation(architecture, overrides)
    evaluator.losses(examples)
    before = mx.get_active_memory()
    allocator.start_peak()
    evaluator.losses(examples)
    expected = estimate(evaluator, load)

    # With graphs, the estimate has more buffers in flight than a fast device may hold.
    least = expected / (3 if allocator.graph_limits() is None else 4)
    assert least < allocator.last_peak_bytes() - before <= expected


@pytest.mark.parametrize("case", H200["evaluation"], ids=lambda case: case["model_type"])
def test_batch_took_no_more_memory_on_an_h200_than_expected(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"architecture": "sm_90", "total_memory": 150 * 10**9}
    monkeypatch.setattr(allocator.mx, "device_info", lambda: info)
    monkeypatch.setattr("mlxtune.backend.step.evaluator.on_cpu", lambda: False)
    for name in ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"):
        monkeypatch.delenv(name, raising=False)
    overrides = EXPERTS if case["model_type"] == "qwen3_moe" else {}
    evaluator, _, load = evaluation(case["model_type"], overrides)
    assert load == BatchLoad(*(case[n] for n in ("lines", "width", "positions", "tokens")))
    expected = estimate(evaluator, load)
    assert expected / 3 < case["peak"] <= expected


def evaluation(
    architecture: str, overrides: dict[str, Any]
) -> tuple[Evaluator, list[Example], BatchLoad]:
    """Return an evaluator, and examples that it takes in one batch, with the batch's load."""
    rng = np.random.default_rng(0)
    mask = np.array([0] * 100 + [1] * 60, dtype=np.uint8)
    examples = [
        Example(row, rng.integers(0, 256, len(mask)).astype(np.int32), mask) for row in range(24)
    ]
    evaluator = evaluator_of(Execution(MLX), 10_000, architecture, **overrides)
    ((micro_batch, _),) = evaluator._losses.training.iterate(examples)
    return evaluator, examples, load_of(micro_batch, StepLengths.of(examples))


def test_evaluation_stays_below_the_predicted_peak_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxtune.backend.step.evaluator.max_batch_tokens", lambda parameters: 16384)
    examples, peaks = random_examples(200), []
    for memory_limit in (None, 6_000_000):
        evaluator = evaluator_of(Execution(MLX), 20)
        if memory_limit is not None:
            evaluator._losses.limit_memory(memory_limit)
        evaluator.losses(examples)
        elsewhere = mx.get_active_memory() - weights_of(evaluator)
        allocator.start_peak()
        evaluator.losses(examples)
        peaks.append(allocator.last_peak_bytes() - elsewhere)
    assert peaks[0] > 6_000_000 >= peaks[1]


def weights_of(evaluator: Evaluator) -> int:
    parameters = tree_flatten(evaluator.forward.model.parameters())
    return sum(array.nbytes for _, array in parameters)


def test_evaluation_in_stages_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulate Metal, because CUDA always uses one stage.
    monkeypatch.setattr("mlxtune.backend.step.runner.has_metal", lambda: True)
    whole, staged = (evaluator_of(WAYS["packed"], num_hidden_layers=6) for _ in range(2))
    staged._losses._runner.seconds_per_token = 10.0
    batches = len(list(staged._losses.training.iterate(fixed_step())))
    wanted = whole.losses(fixed_step())
    with counted_evaluations() as count:
        assert staged.losses(fixed_step()).tobytes() == wanted.tobytes()
    assert count[0] > batches


def test_prompts_of_many_pairs_run_once_for_any_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short answers to long prompts are not sorted next to long answers to short prompts."""
    rng = np.random.default_rng(3)
    examples, needed = [], 0
    for row in range(BLOCK_EXAMPLES):
        prompt = rng.integers(3, 300, 4 + row % 9)
        needed += len(prompt)
        for length in (2, 3 + row % 23):
            # The answers begin with different tokens, and their last tokens do not run.
            tokens = np.concatenate([prompt, [length], rng.integers(3, 300, length)])
            mask = np.arange(len(tokens)) >= len(prompt)
            examples.append(Example(row, tokens.astype(np.int32), mask.astype(np.uint8)))
            needed += length
    base = load_base(model_folder("qwen3"), "float32")
    evaluator = Evaluator(base, pytest.fail, execution=Execution(MLX))
    losses, run = evaluator.forward.losses, []

    def counted(batch: Any, *rest: Any) -> mx.array:
        run.append(batch.inputs.size)
        return losses(batch, *rest)

    monkeypatch.setattr(evaluator.forward, "losses", counted)
    evaluator.losses(examples)
    assert sum(run) <= 1.01 * needed
