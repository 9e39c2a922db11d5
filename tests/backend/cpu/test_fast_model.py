"""A model that uses the CPU's functions: the replaced parts, and their results."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text

from mlxtune.backend.cpu import blas_matmuls, fast_model, kernel_functions
from mlxtune.backend.cpu.fast_model import make_fast
from mlxtune.backend.cpu.kernel_layers import BackwardReads, KeptMatmuls, matmul
from mlxtune.backend.models.loading import load_base
from tests.backend.cpu.compared import assert_close, assert_same_function, random
from tests.backend.step.executions import model_folder

TOKENS = mx.array([[5, 9, 200, 33, 7, 7, 1, 64, 12, 90, 91, 3]])
# The parts that each kind of model uses.
USES: dict[str, tuple[str, ...]] = {
    "qwen3": ("attention", "forward", "rms_norm", "rope", "swiglu"),
    "llama": ("attention", "forward", "rms_norm", "rope", "swiglu"),
    "gemma2": ("forward", "rms_norm", "rope"),
    "gemma3_text": ("attention", "forward", "rms_norm", "rope"),
}
HOMES = {
    "forward": blas_matmuls,
    **dict.fromkeys(["attention", "rms_norm", "rope", "swiglu"], kernel_functions),
}


def model_of(architecture: str, quantize: int | None = None) -> nn.Module:
    return load_base(model_folder(architecture, quantize), "float32").model


@pytest.mark.parametrize("quantize", [None, 4])
@pytest.mark.parametrize("architecture", USES)
def test_logits_stay_the_same(architecture: str, quantize: int | None) -> None:
    model = model_of(architecture, quantize)
    expected = model(TOKENS)
    make_fast(model)
    assert_close(model(TOKENS), expected, 1e-5)


@pytest.mark.parametrize("architecture", USES)
def test_modules_use_their_faster_implementation(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = set()

    def noted(name: str, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def instead(*args: object, **options: object) -> mx.array:
            called.add(name)
            return function(*args, **options)

        return instead

    model = model_of(architecture)
    make_fast(model)
    before = {home: vars(home).copy() for home in HOMES.values()}
    for name, home in HOMES.items():
        monkeypatch.setattr(home, name, noted(name, before[home][name]))
    mx.eval(model(TOKENS))
    # Activations come from a table that still holds the functions from before the patch.
    table = {"swiglu"}
    assert called - table == set(USES[architecture]) - table


def test_no_class_is_changed() -> None:
    one, other = model_of("qwen3"), model_of("qwen3")
    kinds = {name: type(part) for name, part in other.named_modules()}
    calls = {kind: kind.__call__ for kind in kinds.values()}
    make_fast(one)
    assert {name: type(part) for name, part in other.named_modules()} == kinds
    assert all(kind.__call__ is call for kind, call in calls.items())
    changed = {name for name, part in one.named_modules() if type(part) is not kinds[name]}
    assert "model.layers.0.self_attn.q_proj" in changed
    assert all(isinstance(part, kinds[name]) for name, part in one.named_modules())


def test_repeated_make_fast_has_no_effect() -> None:
    model = model_of("gemma2")
    make_fast(model)
    kinds = [type(part) for _, part in model.named_modules()]
    expected = model(TOKENS)
    make_fast(model)
    assert mx.array_equal(model(TOKENS), expected)
    assert [type(part).__mro__[-2] for _, part in model.named_modules()] == [
        kind.__mro__[-2] for kind in kinds
    ]


@pytest.mark.parametrize("quantize", [None, 4])
def test_undoing_restores_the_loaded_model(quantize: int | None) -> None:
    model = model_of("gemma2", quantize)
    expected, kinds = model(TOKENS), [type(part) for _, part in model.named_modules()]
    undo = make_fast(model)
    assert not mx.array_equal(model(TOKENS), expected)
    undo()
    assert [type(part) for _, part in model.named_modules()] == kinds
    assert mx.array_equal(model(TOKENS), expected)


def test_parameters_keep_their_names_and_order() -> None:
    model = model_of("gemma3_text", 4)
    before = [name for name, _ in tree_flatten(model.parameters())]
    make_fast(model)
    assert [name for name, _ in tree_flatten(model.parameters())] == before


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_16_bits_are_left_to_mlx(dtype: mx.Dtype) -> None:
    model = model_of("llama")
    model.set_dtype(dtype)
    expected = model(TOKENS)
    make_fast(model)
    assert model(TOKENS).dtype == dtype
    assert mx.array_equal(model(TOKENS), expected)


@pytest.mark.parametrize("last", [True, False])
def test_kept_products_are_taken_again_in_their_order(last: bool) -> None:
    kept, made = KeptMatmuls(BackwardReads(last=last)), [random(2, 2), random(3, 4)]
    with kept.running(replays=False):
        assert matmul(lambda: made[0]) is made[0]
        assert matmul(lambda: made[1]) is made[1]
    with kept.running(replays=True):
        assert matmul(lambda: pytest.fail("made again")) is made[0]
        again = matmul(lambda: pytest.fail("made again"))
        assert again.shape == (3, 4)
        assert (again is made[1]) == last
    assert matmul(lambda: made[1]) is made[1]


def test_soft_capped_logits_of_gemma_4() -> None:
    assert_same_function(
        lambda x: fast_model._CPU_FUNCTIONS[id(gemma4_text.logit_softcap)](30.0, x),
        lambda x: gemma4_text.logit_softcap(30.0, x),
        random(3, 50, scale=40),
    )
