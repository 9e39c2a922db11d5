"""Projections rounded by GPTQ, compared with the paper's formulas and with mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.quant.gptq import gptq_quantize

from mlxtune.backend.adapters.gptq import calibration, quantize_gptq, round_projections
from mlxtune.backend.adapters.storage import Storage
from mlxtune.backend.lora.targets import projections_of
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.models.stored_layers import dequantized_weight
from mlxtune.core.data.encode import Example
from tests.experts import EXPERTS
from tests.models import write_model
from tests.slow import slow_except

FORM: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "affine"}
BY_GPTQ = Storage("as the base, by GPTQ", 4, gptq=True)


def correlated(tokens: int, inputs: int, seed: int = 0) -> mx.array:
    """Return inputs (T, in) in which few directions have most of the variance."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((inputs, inputs)) * np.geomspace(1, 0.05, inputs)
    return mx.array((rng.standard_normal((tokens, inputs)) @ mixed.T).astype(np.float32))


def weights(*shape: int, seed: int = 1) -> mx.array:
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return mx.array(drawn.astype(np.float32))


def values(arrays: Any, form: Mapping[str, Any] = FORM) -> np.ndarray:
    return np.array(mx.dequantize(*arrays, **form))


def formulas(weight: np.ndarray, hessian: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Round a matrix column by column, after equations 2 and 3 of the paper, in float64."""
    left = weight.astype(np.float64)
    inverse = np.linalg.inv(hessian + 0.01 * hessian.trace() / len(hessian) * np.eye(len(hessian)))
    for column in range(len(hessian)):
        if column % group == 0:
            own = mx.array(left[:, column : column + group].astype(np.float32))
            scale, bias = (np.array(each)[:, 0] for each in mx.quantize(own, group, bits)[1:])
        code = np.clip(np.round((left[:, column] - bias) / scale), 0, 2**bits - 1)
        rounded = code * scale + bias
        error = (left[:, column] - rounded) / inverse[column, column]
        left[:, column + 1 :] -= np.outer(error, inverse[column, column + 1 :])
        left[:, column] = rounded
        # Gaussian elimination of the column.
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return left


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (4, 32), (5, 32), (6, 64), (8, 32)])
def test_matrix_is_rounded_by_the_papers_formulas(bits: int, group: int) -> None:
    x, weight = correlated(400, 128), weights(24, 128)
    hessian = x.T @ x
    form = {"group_size": group, "bits": bits, "mode": "affine"}
    found = values(quantize_gptq(weight, hessian, **form), form)
    expected = formulas(np.array(weight), np.array(hessian).astype(np.float64), bits, group)
    # A value halfway between two codes may round differently, and then so does the rest of its row.
    same = np.abs(found - expected).max(axis=1) < 1e-4
    assert same.mean() > 0.8

    def error(rounded: np.ndarray) -> float:
        return float(np.square(np.array(x) @ (rounded - np.array(weight)).T).sum())

    assert error(found) == pytest.approx(error(expected), rel=0.02)
    assert error(found) < 0.7 * error(values(mx.quantize(weight, group, bits), form))


class OneLayer(nn.Module):
    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.layer = nn.Linear(*reversed(weight.shape), bias=False)
        self.layer.weight = weight

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x)


def test_matrix_is_rounded_as_mlx_lm_does() -> None:
    x, weight = correlated(256, 64), weights(16, 64)
    theirs, _ = gptq_quantize(OneLayer(weight), x[None], 4, 32, 4, 32)
    found = quantize_gptq(weight, x.T @ x, **FORM)
    expected = dequantized_weight(theirs.layer)
    same = mx.abs(mx.array(values(found)) - expected).max(axis=1) < 1e-4
    assert float(same.mean()) > 0.8


def test_singular_hessian_gives_no_result() -> None:
    assert quantize_gptq(weights(8, 32), mx.zeros((32, 32)), **FORM) is None
    assert quantize_gptq(weights(8, 32), mx.full((32, 32), mx.nan), **FORM) is None


# A whole model


def examples_of(*lengths: int) -> list[Example]:
    rng = np.random.default_rng(2)
    return [
        Example(i + 1, rng.integers(3, 200, n).astype(np.int32), np.ones(n, dtype=np.uint8))
        for i, n in enumerate(lengths)
    ]


def merged(model: nn.Module) -> dict[str, tuple[nn.Module, mx.array]]:
    """Return a quantised model's projections, with weights that 4 bits cannot represent."""
    found = {}
    for seed, (name, module) in enumerate(projections_of(model).items()):
        weight = dequantized_weight(module)
        found[name] = module, weight + 0.01 * weights(*weight.shape, seed=seed)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", quantize=4)


def rounded(folder: Path, examples: list[Example]) -> tuple[dict[str, Any], int]:
    base = load_base(folder, "float32")
    projections = merged(base.model)
    drawn = calibration(base, projections, examples)
    assert drawn is not None
    made, nearest = round_projections(base, projections, BY_GPTQ, drawn)
    assert not projections  # so that no merged weight stays in memory
    return dict(tree_flatten(dict(made.rounded))), nearest


def test_rounding_twice_gives_the_same_bytes_for_any_padding(folder: Path) -> None:
    examples = examples_of(40, 12, 25)
    first, nearest = rounded(folder, examples)
    again, _ = rounded(folder, examples)
    assert nearest == 0
    assert first.keys() == again.keys()
    assert all(mx.array_equal(first[name], again[name]) for name in first)


def test_gptq_inputs_come_from_rounded_layers_without_padding(folder: Path) -> None:
    """The last projection is rounded on the outputs of the fused layers below it."""
    examples = examples_of(40, 12, 25)
    made, _ = rounded(folder, examples)
    base = load_base(folder, "float32")
    projections = merged(base.model)
    name = [name for name in projections if name.endswith("down_proj")][-1]
    for path, (module, weight) in projections.items():
        module.weight, module.scales, module.biases = (
            made[f"{path}.{part}"] for part in ("weight", "scales", "biases")
        )
        assert weight.shape == dequantized_weight(module).shape
    inputs = []

    class Catcher(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            inputs.append(x[0])
            return x[..., :1] * mx.zeros(projections[name][1].shape[0])

    base.model.update_modules({"model": {"layers": [{}, {"mlp": {"down_proj": Catcher()}}]}})
    for example in examples:
        mx.eval(base.model(mx.array(example.tokens[None])))
    x = mx.concatenate(inputs)
    module = projections[name][0]
    form = {"group_size": module.group_size, "bits": module.bits, "mode": "affine"}
    found = quantize_gptq(projections[name][1], x.T @ x, **form)
    assert found is not None
    same = found[0] == made[f"{name}.weight"]
    assert float(same.mean()) > 0.95


def test_examples_are_as_many_as_memory_allows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_base(folder, "float32")
    projections, examples = merged(base.model), examples_of(*[30] * 50)
    whole = calibration(base, projections, examples)
    assert whole is not None
    assert len(whole.ids) == 50
    mx.eval([weight for _, weight in projections.values()])
    mx.reset_peak_memory()
    weights_too = sum(array.nbytes for _, array in tree_flatten(base.model.parameters()))
    before = mx.get_active_memory() - weights_too
    predicted: list[float] = []
    round_projections(base, dict(projections), BY_GPTQ, whole, predicted.append)
    assert mx.get_peak_memory() - before < whole.memory
    assert len(predicted) == 1 and predicted[0] > 0

    def free(memory: int) -> None:
        monkeypatch.setattr("mlxtune.backend.device.allocator.free_now", lambda: memory)

    free(whole.memory)
    part = calibration(base, projections, examples)
    assert part is not None
    assert 0 < len(part.ids) < 50
    free(1000)
    assert calibration(base, projections, examples) is None


# The latent projections of the small deepseek_v3 are narrower than a group.
FAMILIES = [family for family in EXPERTS if family != "deepseek_v3"]


@pytest.mark.parametrize("family", slow_except(FAMILIES, "qwen3_moe"))
def test_experts_of_every_family_are_rounded(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / family, family, quantize=4, **EXPERTS[family])
    made, nearest = rounded(folder, examples_of(*[40] * 8))
    projections = merged(load_base(folder, "float32").model)
    assert {name.rpartition(".")[0] for name in made} == projections.keys()
    stacked = [name for name, (module, _) in projections.items() if module.weight.ndim == 3]
    matrices = sum(len(weight) if weight.ndim == 3 else 1 for _, weight in projections.values())
    assert stacked
    # Some experts get few tokens.
    assert nearest < matrices / 2
    assert all(mx.isfinite(array).all() for array in made.values())


def test_each_expert_is_rounded_on_its_own_inputs() -> None:
    from mlxtune.backend.adapters.gptq import Calibration, _Projection, _Rounding

    experts = SwitchLinear(64, 16, 3, bias=False).to_quantized(group_size=32, bits=4)
    weight, x = weights(3, 16, 64), correlated(300, 64)[:, None, :]
    indices = mx.array(np.r_[np.zeros(150), np.ones(140), np.full(10, 2)].astype(np.uint32))
    drawn = Calibration(np.zeros((1, 300), dtype=np.int32), np.arange(300), 0)
    rounding = _Rounding({"experts": (experts, weight)}, BY_GPTQ, drawn, lambda seconds: None)
    y = _Projection(rounding, "experts")(x, indices)
    made: Any = rounding.made["experts"]
    # The last expert has fewer inputs than columns, so it is rounded to nearest.
    assert rounding.nearest == 1
    for expert, own in enumerate((x[:150, 0], x[150:290, 0], None)):
        form = {"group_size": 32, "bits": 4, "mode": "affine"}
        expected = mx.quantize(weight[expert], 32, 4)
        if own is not None:
            found = quantize_gptq(weight[expert], own.T @ own, **form)
            assert found is not None
            expected = found
        assert mx.array_equal(made.weight[expert], expected[0])
    assert mx.allclose(y[0, 0], x[0, 0] @ dequantized_weight(made)[0].T, atol=1e-4)
