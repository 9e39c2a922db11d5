"""A model that computes by the CPU's functions: which of its parts do, and what they give."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.cpu import attention, elementwise, products
from mlxtune.backend.cpu.layers import KeptProducts, Reads
from mlxtune.backend.cpu.model import make_fast
from mlxtune.backend.models.loading import load_base
from tests.backend.cpu.compared import assert_close, random
from tests.backend.step.executions import model_folder

TOKENS = mx.array([[5, 9, 200, 33, 7, 7, 1, 64, 12, 90, 91, 3]])
# What a model of the kind is known to be made of.
USES: dict[str, tuple[str, ...]] = {
    "qwen3": ("attention", "forward", "rms_norm", "rope", "swiglu"),
    "llama": ("attention", "forward", "rms_norm", "rope", "swiglu"),
    "gemma2": ("forward", "gelu_approx", "rms_norm", "rope", "softmax", "tanh"),
    "gemma3_text": ("attention", "forward", "gelu_approx", "rms_norm", "rope"),
}
HOMES = {
    "attention": attention,
    "forward": products,
    "rope": elementwise,
    **dict.fromkeys(["gelu_approx", "rms_norm", "softmax", "swiglu", "tanh"], elementwise),
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
def test_parts_that_have_a_faster_way_take_it(
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
    # Those that are kept in a table are called by what they were then.
    table = {"gelu_approx", "tanh", "rope", "swiglu"}
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


def test_done_twice_is_done_once() -> None:
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
def test_undone_it_computes_as_it_was_loaded(quantize: int | None) -> None:
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
    kept, made = KeptProducts(Reads(inputs=True, last=last)), [random(2, 2), random(3, 4)]
    with kept.running(replays=False):
        assert kept.product(lambda: made[0]) is made[0]
        assert kept.product(lambda: made[1]) is made[1]
    with kept.running(replays=True):
        assert kept.product(lambda: pytest.fail("made again")) is made[0]
        again = kept.product(lambda: pytest.fail("made again"))
        assert again.shape == (3, 4)
        assert (again is made[1]) == last


def test_what_turns_out_to_be_read_is_made_again() -> None:
    kept = KeptProducts(Reads(inputs=False))
    with kept.running(replays=False):
        kept.product(lambda: random(2, 2))
    more = kept.reads.more
    assert more == Reads(inputs=False, last=True)
    kept.reads = more
    with kept.running(replays=True):
        assert kept.product(lambda: random(3, 3)).shape == (3, 3)
    assert kept.reads_next == more
    assert more.more == Reads(inputs=True, last=True)
    assert Reads(inputs=True, last=True).more is None
