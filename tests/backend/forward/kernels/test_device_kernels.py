"""The trial of kernels: what makes it fail, and which form is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.forward.kernels import device_kernels
from mlxtune.backend.forward.kernels.device_kernels import (
    CUDA,
    METAL,
    MLX_OPERATIONS,
    Choice,
    Chooser,
    Function,
    KernelSource,
    Language,
    Trial,
    TrialInputs,
    choose_form,
)
from tests.backend.forward.kernels.kernel_compilers import FakeDevice
from tests.slow import long, slow


def square(x: mx.array) -> mx.array:
    return x * x


def nearly(factor: float) -> Function:
    return lambda x: factor * x * x


def in_float32(x: mx.array) -> mx.array:
    return x.astype(mx.float32) ** 2


def case() -> TrialInputs:
    return TrialInputs([mx.linspace(-1, 2, 16)], [mx.linspace(1, 3, 16)])


def trial(**forms: Function) -> Callable[[], Trial]:
    names = ("the square", "the gradient")
    return lambda: Trial(forms, square, small=case, realistic=case, names=names)


def clock(*seconds: float) -> Callable[[], float]:
    """Return a fake clock: runs of the n-th form take `seconds[n]`, except two slower ones."""

    def ticks() -> Iterator[float]:
        now = 0.0
        for second in seconds:
            for slower in (50, 50, 3, 0, 7, 5, 9):
                yield now
                now += 3 * (second + slower)
                yield now

    return ticks().__next__


def selected(choice: Choice, **forms: Function) -> str:
    names = [name for name, form in forms.items() if form is choice.form]
    return names[0] if names else MLX_OPERATIONS


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 1.0, 1.0), "both"),
        # A form must gain a tenth over a preferred one.
        ((1.0, 0.91, 0.95), "both"),
        ((1.0, 0.89, 0.85), "gradient"),
        ((1.0, 0.95, 0.85), MLX_OPERATIONS),
        ((1.0, 2.0, 0.5), MLX_OPERATIONS),
    ],
)
def test_fastest_form_is_chosen_and_preferred_form_in_doubt(
    seconds: tuple[float, ...], expected: str
) -> None:
    forms = {"both": nearly(1.0), "gradient": nearly(1.0)}
    choice = choose_form(trial(**forms), mx.float32, clock(*seconds))
    assert selected(choice, **forms) == expected
    assert choice.problem == ""
    assert dict(choice.seconds) == pytest.approx(
        dict(zip([*forms, MLX_OPERATIONS], seconds, strict=True))
    )


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (nearly(1.01), "in float16, the square differs by 0.0098"),
        (nearly(float("nan")), "in float16, the square differs by nan"),
        (in_float32, "in float16, the square differs by"),
    ],
    ids=["wrong", "not a number", "of another dtype"],
)
def test_wrong_form_is_a_problem_and_nothing_is_timed(form: Function, problem: str) -> None:
    choice = choose_form(trial(right=nearly(1.0), wrong=form), mx.float16, clock())
    assert choice.form is None
    assert choice.problem.startswith(problem)
    assert not choice.seconds


def test_error_is_a_problem_in_one_line() -> None:
    def fails(x: mx.array) -> Any:
        raise RuntimeError("Unable to build\nthe kernel")

    assert (
        choose_form(trial(fails=fails), mx.float32, clock()).problem == "Unable to build the kernel"
    )


def test_choice_is_made_once_for_a_dtype_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "on_cpu", lambda: False)
    wrong_in_16_bits = nearly(1.0001)
    # A second timing would end the fake clock.
    chooser = Chooser(trial(both=wrong_in_16_bits), clock(1.0, 2.0))
    assert [chooser.form(mx.bfloat16) for _ in range(2)] == [wrong_in_16_bits] * 2
    assert chooser.problem() == ""
    assert chooser.form(mx.float32) is None
    assert chooser.problem() == "in float32, the square differs by 0.0001"


def test_problem_is_known_before_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Chooser(trial(both=nearly(1.1)), clock())
    monkeypatch.setattr(device_kernels, "on_cpu", lambda: True)
    assert chooser.problem() == ""
    monkeypatch.setattr(device_kernels, "on_cpu", lambda: False)
    assert chooser.problem() == "in bfloat16, the square differs by 0.1"


def test_constants_follow_the_primals_and_keep_their_dtype() -> None:
    rows = mx.array([2, 0, 2])
    found = TrialInputs([mx.ones((3, 2))], [mx.ones((3, 2))], [rows]).astype(mx.bfloat16)
    values, gradient = found.run(lambda x, rows: x[rows])
    assert found.constants[0].dtype == rows.dtype
    assert (values.dtype, gradient.dtype) == (mx.bfloat16, mx.bfloat16)
    assert gradient.tolist() == [[1, 1], [0, 0], [2, 2]]


def test_languages_replace_the_same_names() -> None:
    assert METAL.names.keys() == CUDA.names.keys()
    with pytest.raises(KeyError, match="threat"):
        CUDA.translate("int i = $threat;")


SUMS = KernelSource(
    "sums",
    ("x",),
    ("lane_sums", "sums"),
    """
    $shared float parts[2];
    const float sum = mlxtune::lane_sum(static_cast<float>(x[$thread]));
    if ($lane == 0) {
        parts[$local / 32] = sum;
    }
    $barrier;
    lane_sums[$thread] = static_cast<T>(sum);
    sums[$thread] = static_cast<T>(parts[0] + parts[1] + 100 * $group + 1000 * $thread_y);
""",
)


@pytest.mark.parametrize("language", [slow(METAL), long(CUDA)], ids=["metal", "cuda"])
def test_threads_of_a_group_share_sums(language: Language) -> None:
    x = np.arange(128, dtype=np.float32) % 7
    kernel = SUMS.make(language, FakeDevice(language=language).make)
    lane_sums, sums = kernel(
        inputs=[mx.array(x)],
        template=[("T", mx.float32)],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(128,)] * 2,
        output_dtypes=[mx.float32] * 2,
    )
    warps = x.reshape(4, 32).sum(1)
    assert lane_sums.tolist() == warps.repeat(32).tolist()
    groups = warps.reshape(2, 2).sum(1) + np.array([0, 100])
    assert sums.tolist() == groups.repeat(64).tolist()


@pytest.mark.parametrize("transform", [mx.grad, mx.compile, mx.checkpoint])
def test_choice_is_possible_while_mlx_transforms_the_caller(
    transform: Callable[[Function], Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first use of a kernel may be inside of a step's gradient."""
    monkeypatch.setattr(device_kernels, "on_cpu", lambda: False)
    form = nearly(1.0)
    chooser = Chooser(trial(both=form), clock(1.0, 2.0))

    def caller(x: mx.array) -> mx.array:
        return (chooser.form(mx.float32) or square)(x).sum()

    mx.eval(transform(caller)(mx.ones(4)))
    assert chooser.choice(mx.float32).form is form
