"""Kernels for Metal and CUDA from one source, and trials that decide whether a device uses them.

A source is the body of a kernel. Names that differ between the languages are placeholders, such as
`$thread`; functions that differ are in the namespace `mlxtune` of a header. Integers are `int` and
`unsigned int`, because CUDA has no `uint`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any

import mlx.core as mx

from mlxtune.backend.device.default_device import has_metal, on_cpu
from mlxtune.errors import one_line

# Takes arrays and returns an array, or several.
Function = Callable[..., Any]
# `mx.fast.metal_kernel`, `mx.fast.cuda_kernel`, or a fake of them.
Make = Callable[..., Any]
Arrays = Sequence[mx.array]

# Metal passes inputs with fewer elements in the constant address space, which `mlxtune::load` does
# not read (mlx/backend/common/metal_kernel.cpp).
MIN_SIZE = 8
# The largest allowed difference from MLX's operations in float32, as a fraction of the largest
# value.
TOLERANCES = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}

# The numbers of untimed and of timed runs of a form, and of its calls in a run: with several calls,
# the device's time exceeds the time to start it.
_WARMUPS, _RUNS, _CALLS = 2, 5, 3
# A form must be faster than a preferred one by this fraction: a choice within the timing's noise
# would differ between runs, and so would the last bits of their results.
_GAIN = 0.1

# A Pack has the alignment of a single load. `load` fills a Pack beyond `size` with zeros, and
# `store` writes nothing there. Pointers into a slice may be misaligned for whole Packs.
_HEADER = """
namespace mlxtune {

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};

template <int N, typename T>
inline $function Pack<T, N> load($space const T* from, unsigned int first, unsigned int size) {
  if ($aligned first + N <= size) {
    $load_whole
  }
  Pack<T, N> pack;
  for (int i = 0; i < N; ++i) {
    pack.at[i] = first + i < size ? from[first + i] : static_cast<T>(0.0f);
  }
  return pack;
}

template <int N, typename T>
inline $function void store(
    $space T* to, unsigned int first, unsigned int size, Pack<T, N> pack) {
  if ($aligned_to first + N <= size) {
    $store_whole
    return;
  }
  for (int i = 0; i < N && first + i < size; ++i) {
    to[first + i] = pack.at[i];
  }
}

inline $function float exp(float x) { return $exp(x); }
inline $function float rsqrt(float x) { return $rsqrt(x); }

// The sum over the 32 lanes of a SIMD group or warp, in every lane; all lanes must call it.
inline $function float lane_sum(float x) {
  $lane_sum
}

}  // namespace mlxtune
"""


@dataclass(frozen=True)
class Language:
    """A language of kernels: the names that replace placeholders in sources, and a header.

    `width` is the number of bytes that a thread should read and write at once.
    """

    name: str
    width: int
    names: Mapping[str, str]
    header: str

    def translate(self, source: str) -> str:
        """Return a source with its placeholders replaced. Raises KeyError for an unknown one."""
        return Template(source).substitute(self.names)


METAL = Language(
    "Metal",
    # As in MLX's own kernels (`WorkPerThread` in mlx/backend/metal/kernels/utils.h).
    8,
    {
        # The thread in the grid, its group, its place in the group, and its place in its 32 lanes.
        "thread": "thread_position_in_grid.x",
        "thread_y": "thread_position_in_grid.y",
        "thread_z": "thread_position_in_grid.z",
        "group": "threadgroup_position_in_grid.x",
        "local": "thread_position_in_threadgroup.x",
        "lane": "thread_index_in_simdgroup",
        # Memory that a group shares, and the point that all its threads must reach.
        "shared": "threadgroup",
        "barrier": "threadgroup_barrier(metal::mem_flags::mem_threadgroup)",
        # The address space of inputs with at least MIN_SIZE elements, and of outputs.
        "space": "device",
    },
    Template(_HEADER).substitute(
        function="",
        space="device",
        # MLX's own Metal kernels read neighbouring elements in a loop too; Metal's compiler joins
        # them, and needs no alignment.
        aligned="",
        load_whole="Pack<T, N> pack;\n"
        "    for (int i = 0; i < N; ++i) pack.at[i] = from[first + i];\n"
        "    return pack;",
        aligned_to="",
        store_whole="for (int i = 0; i < N; ++i) to[first + i] = pack.at[i];",
        exp="metal::precise::exp",
        rsqrt="metal::precise::rsqrt",
        lane_sum="return metal::simd_sum(x);",
    ),
)
CUDA = Language(
    "CUDA",
    # Bytes of the widest vector load.
    16,
    {
        "thread": "(blockIdx.x * blockDim.x + threadIdx.x)",
        "thread_y": "(blockIdx.y * blockDim.y + threadIdx.y)",
        "thread_z": "(blockIdx.z * blockDim.z + threadIdx.z)",
        "group": "blockIdx.x",
        "local": "threadIdx.x",
        "lane": "(threadIdx.x % 32)",
        "shared": "__shared__",
        "barrier": "__syncthreads()",
        "space": "",
    },
    Template(_HEADER).substitute(
        function="__device__",
        space="",
        aligned="reinterpret_cast<size_t>(from + first) % sizeof(Pack<T, N>) == 0 &&",
        load_whole="return *reinterpret_cast<const Pack<T, N>*>(from + first);",
        aligned_to="reinterpret_cast<size_t>(to + first) % sizeof(Pack<T, N>) == 0 &&",
        store_whole="*reinterpret_cast<Pack<T, N>*>(to + first) = pack;",
        exp="expf",
        rsqrt="rsqrtf",
        lane_sum="for (int far = 16; far > 0; far /= 2) {\n"
        "    x += __shfl_xor_sync(0xffffffff, x, far);\n"
        "  }\n"
        "  return x;",
    ),
)


@dataclass(frozen=True)
class KernelSource:
    """The source of a kernel in both languages. Make it a constant of a module: tests find it."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str

    def make(self, language: Language, make: Make) -> Any:
        """Return the kernel, which MLX compiles when it first runs for a template."""
        return make(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=language.translate(self.body),
            header=language.header,
        )


def device_language() -> tuple[Language, Make]:
    """Return the GPU's language, and MLX's function that makes its kernels."""
    if has_metal():
        return METAL, mx.fast.metal_kernel
    return CUDA, mx.fast.cuda_kernel


@dataclass(frozen=True)
class TrialInputs:
    """Arguments of a trial: a function is differentiated by `primals`, followed by `constants`."""

    primals: Arrays
    cotangents: Arrays
    constants: Arrays = ()

    def astype(self, dtype: mx.Dtype) -> "TrialInputs":
        primals = [primal.astype(dtype) for primal in self.primals]
        return TrialInputs(
            primals, [cotangent.astype(dtype) for cotangent in self.cotangents], self.constants
        )

    def run(self, function: Function) -> list[mx.array]:
        """Return the function's values, and then its gradients."""
        values, gradients = mx.vjp(
            lambda *primals: function(*primals, *self.constants),
            list(self.primals),
            list(self.cotangents),
        )
        return [*values, *gradients]


@dataclass(frozen=True)
class Trial:
    """Forms of a function and its gradient that use kernels, and the same by MLX's operations.

    `forms` begins with the preferred form and may go on with forms that have a kernel for the value
    or for the gradient alone. The cases are in float32: `small()`, which should leave groups of
    threads partly used, and `realistic()`, which is timed. `names` has a name of each
    value and then of each gradient, for messages.
    """

    forms: Mapping[str, Function]
    plain: Function
    small: Callable[[], TrialInputs]
    realistic: Callable[[], TrialInputs]
    names: Sequence[str]


@dataclass(frozen=True)
class Choice:
    """The form of a function that a device uses, None for MLX's operations.

    `problem` says why kernels cannot be used; it is empty if MLX's operations are merely faster.
    `seconds` has each form's time for values and gradients, unless there was a problem.
    """

    form: Function | None
    problem: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


MLX_OPERATIONS = "MLX's operations"


class Chooser:
    """Chooses the form of a function for each dtype when the dtype is first used.

    A dtype is tried alone: CUDA's kernels are compiled in each process and for each dtype, and
    MLX keeps none on disk (mlx/backend/cuda/custom_kernel.cpp). `clock` is read around runs.
    """

    def __init__(
        self, trial: Callable[[], Trial], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._trial = trial
        self._clock = clock
        self._choices: dict[mx.Dtype, Choice] = {}

    def form(self, dtype: mx.Dtype) -> Function | None:
        """Return the form for a dtype; None for MLX's operations, and on the CPU."""
        return None if on_cpu() else self.choice(dtype).form

    def problem(self) -> str:
        """Return why kernels cannot be used; empty if they can, or on the CPU.

        Tries the dtypes used so far; bfloat16 if none.
        """
        if on_cpu():
            return ""
        choices = list(self._choices.values()) or [self.choice(mx.bfloat16)]
        return next((choice.problem for choice in choices if choice.problem), "")

    def choice(self, dtype: mx.Dtype) -> Choice:
        """Return the choice for a dtype, after a trial at the first call."""
        if dtype not in self._choices:
            self._choices[dtype] = choose_form(self._trial, dtype, self._clock)
        return self._choices[dtype]


def choose_form(trial: Callable[[], Trial], dtype: mx.Dtype, clock: Callable[[], float]) -> Choice:
    """Return the fastest form of a trial in a dtype, if its kernels compile and are right."""
    try:
        candidate = trial()
        if problem := next(_problems(candidate, dtype), ""):
            return Choice(None, problem)
        case = candidate.realistic().astype(dtype)
        forms = {**candidate.forms, MLX_OPERATIONS: candidate.plain}
        times = {name: fastest_seconds(form, case, clock) for name, form in forms.items()}
    # Any error may occur: a compiler may be missing, or reject the source.
    except Exception as error:  # noqa: BLE001
        return Choice(None, one_line(error))
    finally:
        mx.clear_cache()
    name = next(iter(times))
    for other in times:
        if times[other] < times[name] * (1 - _GAIN):
            name = other
    return Choice(candidate.forms.get(name), seconds=times)


def fastest_seconds(function: Function, case: TrialInputs, clock: Callable[[], float]) -> float:
    """Return the least time of several runs of a function and its gradient."""
    mx.eval(*case.primals, *case.cotangents, *case.constants)
    times = []
    for _ in range(_WARMUPS + _RUNS):
        started = clock()
        mx.eval([case.run(function) for _ in range(_CALLS)])
        times.append(clock() - started)
    return min(times[_WARMUPS:]) / _CALLS


def _problems(trial: Trial, dtype: mx.Dtype) -> Iterator[str]:
    """Describe each value or gradient that differs from MLX's by more than rounding."""
    case = trial.small().astype(dtype)
    expected = case.astype(mx.float32).run(trial.plain)
    for form in trial.forms.values():
        for name, one, other in zip(trial.names, case.run(form), expected, strict=True):
            apart = mx.abs(one.astype(mx.float32) - other).max() / mx.abs(other).max()
            difference = float(apart)
            if one.dtype != dtype or not difference <= TOLERANCES[dtype]:
                yield f"in {dtype_name(dtype)}, {name} differs by {difference:.2g}"


def dtype_name(dtype: mx.Dtype) -> str:
    """Return a dtype's name, such as "bfloat16"."""
    return str(dtype).removeprefix("mlx.core.")
