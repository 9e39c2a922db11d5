"""Compilers for the package's kernels on a machine without a GPU: C++ for both languages, NVRTC.

`FakeDevice.make` takes the place of `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`. It writes the
function around a source as MLX does (mlx/backend/common/metal_kernel.cpp and
mlx/backend/cuda/custom_kernel.cpp), compiles it as C++ with stand-ins for the language's own names,
and runs it on the CPU, a group of threads after another. So the formulas, indices, bounds and types
of a source are tested, and on CUDA the alignment of its wide loads.

This does not cover Metal's compiler, which is stricter: here address spaces are empty, so that a
pointer to the wrong space compiles, and C++ functions exist that Metal lacks. It does not cover
races, because threads meet at every barrier and exchange in turns, nor limits of registers and
shared memory, the rounding of a GPU's functions, or speed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxtune.backend.forward.kernels.device_kernels import METAL, Language

Bytes = npt.NDArray[np.uint8]
# Bytes around an array's data that no kernel may change.
_GUARD = 64
_FILL = 7
_CPP = {
    mx.float32: "float",
    mx.float16: "_Float16",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
    mx.uint64: "uint64_t",
}
# Names that make a kernel's threads wait for one another.
_WAITS = ("barrier", "lane_sum", "__sync", "__shfl", "simd_")

_STAND_INS = """
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if WAITS
#include <barrier>
#include <memory>
#include <thread>
#include <vector>
#endif

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    bits = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

// The sanitizer calls this function before an access that the CPU would allow and a GPU would not.
extern "C" int misaligned;
int misaligned = 0;
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { ++misaligned; }

struct Dim3 { unsigned int x, y, z; };
static thread_local Dim3 place, in_group, group_in_grid, group_size;
static thread_local unsigned int lane_in_group;

#if WAITS
// Lanes write their values, meet, read, and meet again.
struct Lanes {
  std::barrier<> meet;
  uint64_t values[32];
  bool present[32] = {};
  explicit Lanes(int count) : meet(count) {}
};
static thread_local Lanes* lanes;
static std::barrier<>* whole_group;

template <typename V>
static V shuffled(V mine, unsigned int from) {
  std::memcpy(&lanes->values[lane_in_group], &mine, sizeof(V));
  lanes->meet.arrive_and_wait();
  V other;
  std::memcpy(&other, &lanes->values[from % 32], sizeof(V));
  // CUDA's result is undefined if the other lane has returned.
  if (!lanes->present[from % 32]) other = std::numeric_limits<V>::quiet_NaN();
  lanes->meet.arrive_and_wait();
  return other;
}
#endif
"""
_METAL = """
#define thread_position_in_grid place
#define thread_position_in_threadgroup in_group
#define threadgroup_position_in_grid group_in_grid
#define threads_per_threadgroup group_size
#define thread_index_in_simdgroup lane_in_group
#define device
#define constant
#define threadgroup static
typedef _Float16 half;
namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
namespace precise {
inline float exp(float x) { return std::exp(x); }
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
}
#if WAITS
inline float simd_sum(float x) {
  std::memcpy(&lanes->values[lane_in_group], &x, sizeof(x));
  lanes->meet.arrive_and_wait();
  float sum = 0;
  for (int i = 0; i < 32; ++i) {
    float other;
    std::memcpy(&other, &lanes->values[i], sizeof(other));
    // Lanes that have returned do not count. No lane returns before the next meeting.
    if (lanes->present[i]) sum += other;
  }
  lanes->meet.arrive_and_wait();
  return sum;
}
#else
// Declared for the header; a kernel that calls it waits.
inline float simd_sum(float) { return NAN; }
#endif
}
#if WAITS
inline void threadgroup_barrier(metal::mem_flags) { whole_group->arrive_and_wait(); }
#endif
"""
_CUDA = """
// Some systems' C++ headers have this name, and CUDA does not.
#define uint CUDA_has_no_uint
#define threadIdx in_group
#define blockIdx group_in_grid
#define blockDim group_size
#define __device__
#define __shared__ static
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
#if WAITS
template <typename V>
inline V __shfl_xor_sync(unsigned int, V mine, int far) {
  return shuffled(mine, lane_in_group ^ far);
}
inline void __syncthreads() { whole_group->arrive_and_wait(); }
#else
// Declared for the header; a kernel that calls it waits.
inline float __shfl_xor_sync(unsigned int, float, int) { return NAN; }
#endif
"""
# Metal leaves out threads beyond the grid; CUDA rounds it up to whole groups.
_RUN = """
static void run_thread(
    void** arrays, const int* const* shapes, const Dim3& group, const Dim3& at, const Dim3& size) {
  group_in_grid = group;
  group_size = size;
  in_group = at;
  place = {group.x * size.x + at.x, group.y * size.y + at.y, group.z * size.z + at.z};
  lane_in_group = (at.x + size.x * (at.y + size.y * at.z)) % 32;
  CALL;
}

extern "C" void run(void** arrays, const int* const* shapes, const int* grid, const int* threads) {
  Dim3 size, groups;
  unsigned int* const sizes[] = {&size.x, &size.y, &size.z};
  unsigned int* const counts[] = {&groups.x, &groups.y, &groups.z};
  for (int i = 0; i < 3; ++i) {
    *sizes[i] = threads[i] < grid[i] ? threads[i] : grid[i];
    *counts[i] = (grid[i] + threads[i] - 1) / threads[i];
  }
  for (unsigned int gz = 0; gz < groups.z; ++gz)
    for (unsigned int gy = 0; gy < groups.y; ++gy)
      for (unsigned int gx = 0; gx < groups.x; ++gx) {
        const Dim3 group = {gx, gy, gz};
        auto exists = [&](const Dim3& at) {
          return !EXACT || (gx * size.x + at.x < unsigned(grid[0]) &&
              gy * size.y + at.y < unsigned(grid[1]) && gz * size.z + at.z < unsigned(grid[2]));
        };
        auto each = [&](auto visit) {
          for (unsigned int z = 0; z < size.z; ++z)
            for (unsigned int y = 0; y < size.y; ++y)
              for (unsigned int x = 0; x < size.x; ++x)
                if (exists({x, y, z})) visit(Dim3{x, y, z});
        };
#if WAITS
        auto index = [&](const Dim3& at) { return at.x + size.x * (at.y + size.y * at.z); };
        int total = 0;
        std::vector<int> counts((size.x * size.y * size.z + 31) / 32, 0);
        each([&](const Dim3& at) { ++total; ++counts[index(at) / 32]; });
        std::barrier<> all(total);
        whole_group = &all;
        std::vector<std::unique_ptr<Lanes>> of_group;
        for (int count : counts) of_group.push_back(std::make_unique<Lanes>(count));
        each([&](const Dim3& at) { of_group[index(at) / 32]->present[index(at) % 32] = true; });
        std::vector<std::thread> running;
        each([&](const Dim3& at) {
          running.emplace_back([&, at] {
            lanes = of_group[index(at) / 32].get();
            run_thread(arrays, shapes, group, at, size);
            lanes->present[index(at) % 32] = false;
            lanes->meet.arrive_and_drop();
            all.arrive_and_drop();
          });
        });
        for (auto& one : running) one.join();
#else
        each([&](const Dim3& at) { run_thread(arrays, shapes, group, at, size); });
#endif
      }
}
"""


class FakeDevice:
    """Makes kernels that run their C++ translation on the CPU, and records their calls.

    The last output is multiplied by `factor`, to make a wrong kernel. Arrays begin `offset`
    elements after an aligned address, as slices may.
    """

    def __init__(self, factor: float = 1.0, *, language: Language = METAL, offset: int = 0) -> None:
        self.calls: list[dict[str, Any]] = []
        self.factor = factor
        self.language = language
        self.offset = offset

    def make(
        self,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str = "",
    ) -> Any:
        def run(*, inputs: list[mx.array], **options: Any) -> list[mx.array]:
            self.calls.append({"name": name, "inputs": inputs, **options})
            dtypes = [each.dtype for each in inputs]
            names = zip(
                [*input_names, *output_names], dtypes + options["output_dtypes"], strict=True
            )
            text = _cpp_text(self.language, header, source, list(names), options["template"])
            outputs = _run_on_cpu(compiled(text), inputs, options, self.offset)
            outputs[-1] = (self.factor * outputs[-1]).astype(outputs[-1].dtype)
            return outputs

        return run


def _cpp_text(
    language: Language,
    header: str,
    source: str,
    arrays: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, Any]],
) -> str:
    """Return a library in C++ whose function `run` runs the kernel for every thread of a grid."""
    parameters, given = [], []
    for i, (name, dtype) in enumerate(arrays):
        parameters.append(f"{_CPP[dtype]}* {name}")
        given.append(f"static_cast<{_CPP[dtype]}*>(arrays[{i}])")
        if f"{name}_shape" in source:
            parameters.append(f"const int* {name}_shape")
            given.append(f"shapes[{i}]")
    kernel = "\n".join(
        [
            f"static void kernel({', '.join(parameters)}) {{",
            *(_template_line(name, value) for name, value in template),
            source,
            "}",
        ]
    )
    waits = int(any(word in source for word in _WAITS))
    # A header may declare functions that wait, which this kernel does not call.
    stand_ins = _STAND_INS + (_METAL if language is METAL else _CUDA)
    run = _RUN.replace("CALL", f"kernel({', '.join(given)})")
    run = run.replace("EXACT", str(int(language is METAL)))
    return f"#define WAITS {waits}\n{stand_ins}\n{header}\n{kernel}\n{run}"


def _template_line(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_CPP[value]};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {str(value).lower()};"


_folder = tempfile.TemporaryDirectory(prefix="kernels-")


@cache
def compiled(text: str) -> ctypes.CDLL:
    """Return a library compiled from C++, with warnings as errors."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    file = Path(_folder.name, f"{abs(hash(text))}.cpp")
    file.write_text(text)
    warnings = ("-Wall", "-Werror", "-Wno-unused", "-Wno-sign-compare")
    options = ("-std=c++20", "-O0", "-fPIC", "-fsanitize=alignment")
    unlinked, library = file.with_suffix(".o"), file.with_suffix(".so")
    # Linked without the sanitizer's own library, whose function the stand-ins replace.
    for command in (
        [*options, *warnings, "-c", str(file), "-o", str(unlinked)],
        ["-shared", "-pthread", str(unlinked), "-o", str(library)],
    ):
        result = subprocess.run(
            [compiler, *command], capture_output=True, text=True, timeout=120, check=False
        )
        if result.returncode:
            raise RuntimeError(f"the C++ compiler refuses the kernel: {result.stderr}")
    return ctypes.CDLL(str(library))


def _run_on_cpu(
    library: ctypes.CDLL, inputs: Sequence[mx.array], options: dict[str, Any], offset: int
) -> list[mx.array]:
    shapes, dtypes = options["output_shapes"], options["output_dtypes"]
    sizes = [each.dtype.size for each in inputs] + [each.size for each in dtypes]
    data = [_bytes(each) for each in inputs]
    data += [
        np.full(int(np.prod(shape)) * dtype.size, _FILL, np.uint8)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    guarded = [_guarded(each, offset * size) for each, size in zip(data, sizes, strict=True)]
    before = [each.copy() for each, _ in guarded]
    arrays = (ctypes.c_void_p * len(data))(*(each.ctypes.data + at for each, at in guarded))
    lengths = [(ctypes.c_int * max(1, x.ndim))(*x.shape) for x in inputs]
    pointers = (ctypes.c_void_p * len(lengths))(*(ctypes.addressof(x) for x in lengths))
    grid, group = ((ctypes.c_int * 3)(*options[key]) for key in ("grid", "threadgroup"))
    library.run(arrays, pointers, grid, group)
    assert ctypes.c_int.in_dll(library, "misaligned").value == 0, "an access is misaligned"
    found = []
    for i, ((after, at), earlier) in enumerate(zip(guarded, before, strict=True)):
        end = at + data[i].size
        written = slice(at, end) if i >= len(inputs) else slice(0, 0)
        earlier[written] = after[written]
        assert (after == earlier).all(), "a kernel wrote outside its outputs"
        if i >= len(inputs):
            j = i - len(inputs)
            found.append(_array(after[at:end], shapes[j], dtypes[j]))
    return found


def _guarded(data: Bytes, offset: int) -> tuple[Bytes, int]:
    """Return a buffer with the data between guards, and the place of the data in it."""
    buffer = np.full(data.size + 3 * _GUARD + offset, _FILL, np.uint8)
    at = _GUARD + -buffer.ctypes.data % _GUARD + offset
    buffer[at : at + data.size] = data
    return buffer, at


def _bytes(array: mx.array) -> Bytes:
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.array(bits)).reshape(-1).view(np.uint8)


def _array(data: Bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.array(data.copy()).view(dtype).reshape(shape)
