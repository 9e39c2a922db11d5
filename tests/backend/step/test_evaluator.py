"""The losses of examples one by one, on every fast path, against the model as mlx-lm runs it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxtune import TrainConfig, train
from mlxtune.backend.adapters.attach import Adapted, load_adapted
from mlxtune.backend.cpu.operations import CPU
from mlxtune.backend.model.loading import load_base
from mlxtune.backend.step.evaluator import Evaluator
from mlxtune.backend.step.operations import MLX
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from tests.backend.step.executions import WAYS, first_supervised, fixed_step, model_folder
from tests.models import sums, write_chat

KERNELS = Execution(CPU)


def plain(model: object, example: Example) -> float:
    """Return the summed cross-entropy of an example, from mlx-lm's full logits, in numpy."""
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


@pytest.mark.parametrize("tokens_at_once", [1, 60, 10_000])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_each_examples_loss_is_that_of_full_logits(way: Execution, tokens_at_once: int) -> None:
    base = load_base(model_folder("qwen3"), "float32")
    examples = fixed_step()
    wanted = expected(base.model, examples)
    evaluator = Evaluator(
        base.model,
        base.parameters,
        pytest.fail,
        execution=replace(way, micro_batch_tokens=tokens_at_once),
    )
    np.testing.assert_allclose(evaluator.losses(examples), wanted, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("way", [Execution(MLX), KERNELS], ids=["plain", "kernels"])
def test_other_heads_and_windows_give_it_too(architecture: str, way: Execution) -> None:
    base = load_base(model_folder(architecture), "float32")
    wanted = expected(base.model, fixed_step())
    evaluator = Evaluator(base.model, base.parameters, pytest.fail, execution=way)
    np.testing.assert_allclose(evaluator.losses(fixed_step()), wanted, rtol=1e-5)


@pytest.mark.parametrize("way", [Execution(MLX), KERNELS], ids=["plain", "kernels"])
def test_base_and_adapted_are_both_evaluated_on_one_model(adapter: Path, way: Execution) -> None:
    examples, folder = fixed_step(), model_folder("qwen3")
    untouched = expected(load_base(folder, "float32").model, examples)
    adapted: Adapted = load_adapted(load_base(folder, "float32"), str(adapter))
    with_it = expected(adapted.model, examples)
    assert np.abs(with_it - untouched).max() > 0.1
    evaluator = Evaluator(adapted.model, adapted.base.parameters, pytest.fail, execution=way)
    for on, wanted in ((False, untouched), (True, with_it), (False, untouched)):
        adapted.use_adapter(on)
        np.testing.assert_allclose(evaluator.losses(examples), wanted, rtol=1e-5)


def test_closed_evaluator_leaves_base_and_adapted_as_they_were_loaded(adapter: Path) -> None:
    adapted = load_adapted(load_base(model_folder("qwen3"), "float32"), str(adapter))
    tokens = mx.array([[5, 9, 200, 33, 7]])
    with_it = adapted.model(tokens)
    adapted.use_adapter(False)
    without = adapted.model(tokens)
    adapted.use_adapter(True)
    with closing(
        Evaluator(adapted.model, adapted.base.parameters, pytest.fail, execution=KERNELS)
    ) as evaluator:
        # Modules that are off the model when it closes are restored too.
        adapted.use_adapter(False)
        evaluator.losses(fixed_step())
    assert mx.array_equal(adapted.model(tokens), without)
    adapted.use_adapter(True)
    assert mx.array_equal(adapted.model(tokens), with_it)


@pytest.mark.parametrize("tokens_at_once", [1, 10_000])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_supervised_first_token_has_no_loss(way: Execution, tokens_at_once: int) -> None:
    """Nothing predicts it, in a micro-batch, a line or behind a shared beginning."""
    base = load_base(model_folder("qwen3"), "float32")
    examples = [first_supervised(example) for example in fixed_step()]
    wanted = expected(base.model, examples)
    evaluator = Evaluator(
        base.model,
        base.parameters,
        pytest.fail,
        execution=replace(way, micro_batch_tokens=tokens_at_once),
    )
    np.testing.assert_allclose(evaluator.losses(examples), wanted, rtol=1e-5)
    np.testing.assert_allclose(evaluator.losses(fixed_step()), wanted, rtol=1e-5)
