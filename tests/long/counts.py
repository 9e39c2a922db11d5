"""Count a step's matrix products and kernel launches from its graph, on any device.

Nothing is computed. Products are counted in MLX's export of the gradient's graph, which has shapes,
and launches in MLX's drawing of the graph, which shows compiled operations.
"""

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx.utils import tree_map

from mlxtune.backend.forward import gates, operations
from mlxtune.backend.forward.kernels.attention_kernels import (
    AttentionKernels,
    plain_packed,
    plain_padded,
)
from mlxtune.backend.forward.kernels.device_kernels import CUDA
from mlxtune.backend.forward.kernels.gate_kernels import GateKernels
from mlxtune.backend.lora import optimizer
from mlxtune.backend.models.packed import Layout
from mlxtune.core.data.encode import Example
from tests.long.graph_order import Operation, followed, ordered, tie

# The outputs of an exported function, and pairs of tied arrays; see `ExportableVjp`.
Traced = tuple[list[mx.array], Sequence[tuple[mx.array, mx.array]]]
# A gradient as a function of a micro-batch's tokens, and those tokens.
Gradient = tuple[Callable[[mx.array], Traced], mx.array]

_MATMULS = {
    "AddMM",
    "BlockMaskedMM",
    "GatherMM",
    "GatherQMM",
    "Matmul",
    "QuantizedMatmul",
    "SegmentedMM",
}
# Primitives that launch no kernel: views, and primitives that only set the order of others.
_VIEWS = {
    "AsStrided",
    "Broadcast",
    "BroadcastAxes",
    "Copy",
    "CustomTransforms",
    "Depends",
    "ExpandDims",
    "Slice",
    "Split",
    "Squeeze",
    "StopGradient",
    "Transpose",
    "View",
}
# These are views too, unless the array is transposed: then they copy it.
_RESHAPES = {"Flatten", "Reshape", "Unflatten"}
LAUNCH_NONE = _VIEWS | _RESHAPES

_ZERO = {each: mx.array(0, each) for each in (mx.float32, mx.float16, mx.bfloat16)}
mx.eval(_ZERO)


class GraphSource(Protocol):
    """One side of a benchmark, whose steps can be built without computing them."""

    def lazy_step(self, examples: Sequence[Example]) -> Any:
        """Return all arrays that a step evaluates, compiled as on a GPU."""

    def gradients(self, examples: Sequence[Example]) -> Iterator[Gradient]:
        """Yield the gradient of each micro-batch of a step."""

    def heads(self, examples: Sequence[Example]) -> Iterator[Any]:
        """Yield the outputs and gradients of the head for each micro-batch."""


@dataclass(frozen=True)
class StepCounts:
    """Counts over some steps; a count is None if the graph cannot be exported.

    `matmul_flops` counts matrix products except attention's, which `attention_flops` counts without
    regard to masks. `launches` counts kernel launches by primitive, and `head_launches` the head's
    launches.
    """

    matmul_flops: int | None = None
    attention_flops: int | None = None
    launches: Counter[str] | None = None
    head_launches: int = 0


def count_steps(source: GraphSource, steps: Sequence[Sequence[Example]]) -> StepCounts:
    """Count the matrix products and kernel launches of steps."""
    found = StepCounts()
    # Any error: steps that MLX cannot trace or export are left uncounted.
    with suppress(Exception):
        found = _count_launches(source, steps)
    with suppress(Exception):
        gradients = (gradient for examples in steps for gradient in source.gradients(examples))
        matmuls = sum((flops(*gradient) for gradient in gradients), Counter[str]())
        found = replace(
            found, matmul_flops=matmuls["products"], attention_flops=matmuls["attention"]
        )
    return found


def _count_launches(source: GraphSource, steps: Sequence[Sequence[Example]]) -> StepCounts:
    launched, head = Counter[str](), 0
    for examples in steps:
        with _fused(), launched_kernels(), _nothing_evaluated():
            launched += launches(source.lazy_step(examples))
        with _fused():
            head += sum(launches(arrays).total() for arrays in source.heads(examples))
    return StepCounts(launches=launched, head_launches=head)


@dataclass(frozen=True)
class Exported:
    """The operations that a gradient's outputs need, in order, and its arrays by name.

    `arrays` holds shapes and dtypes, and `inputs` the names of the arrays for the tokens.
    """

    operations: list[Operation]
    arrays: dict[str, tuple[tuple[int, ...], mx.Dtype]]
    inputs: frozenset[str]


def exported(gradient: Callable[[mx.array], Traced], tokens: mx.array) -> Exported:
    """Return the graph of a gradient."""
    arrays: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {}
    graph: list[Operation] = []
    inputs, ends = list[str](), list[str]()
    outputs = 0

    def traced(tokens: mx.array) -> list[mx.array]:
        nonlocal outputs
        found, tied = gradient(tokens)
        outputs = len(found)
        return [*found, *(each for pair in tied for each in pair)]

    def read(entry: Mapping[str, Any]) -> None:
        given, made = entry.get("inputs", ()), entry.get("outputs", ())
        arrays.update((name, (tuple(shape), dtype)) for name, shape, dtype in (*given, *made))
        names = [tuple(name for name, *_ in each) for each in (given, made)]
        if entry["type"] == "primitive":
            graph.append(Operation(entry["name"], names[0], names[1]))
        elif entry["type"] == "inputs":
            inputs[:] = names[0]
        elif entry["type"] == "outputs":
            ends[:] = names[1]

    # On the CPU, MLX's fused functions export as plain operations.
    with mx.stream(mx.cpu):
        mx.export_function(read, traced, tokens=tokens)
    tied = dict(zip(ends[outputs::2], ends[outputs + 1 :: 2], strict=True))
    needed = ordered(tie(graph, tied), [followed(name, tied) for name in ends[:outputs]])
    return Exported(needed, arrays, frozenset(inputs))


def flops(gradient: Callable[[mx.array], Traced], tokens: mx.array) -> Counter[str]:
    """Return the FLOPs of a gradient's matrix products, with attention's counted separately.

    Attention's products multiply arrays of four axes or more that both depend on the tokens.
    """
    graph, counts = exported(gradient, tokens), Counter[str]()
    dependent = set(graph.inputs)
    shapes = {name: shape for name, (shape, _) in graph.arrays.items()}
    for operation in graph.operations:
        depends = [name in dependent for name in operation.inputs]
        if any(depends):
            dependent.update(operation.outputs)
        out = math.prod(shapes[operation.outputs[0]])
        if operation.kind in _MATMULS:
            deep = len(shapes[operation.outputs[0]]) > 3
            attends = operation.kind == "Matmul" and deep and all(depends)
            inner = shapes[operation.inputs[0]][-1]
            counts["attention" if attends else "products"] += 2 * out * inner
        elif operation.kind == "Convolution":
            counts["products"] += 2 * out * math.prod(shapes[operation.inputs[1]][1:])
    return counts


def launches(tree: Any) -> Counter[str]:
    """Return the number of kernels that a GPU launches to compute arrays, by primitive."""
    drawing, arrays = io.StringIO(), []
    tree_map(lambda leaf: arrays.append(leaf) if isinstance(leaf, mx.array) else None, tree)
    mx.export_to_dot(drawing, *arrays)
    text = drawing.getvalue()
    names = dict(re.findall(r'\{ (\d+) \[label ="([^"]+)"', text))
    makers = {array: names[node] for node, array in re.findall(r'(\d+) -> "(\w+)"', text)}
    inputs: dict[str, list[str]] = {node: [] for node in names}
    for array, node in set(re.findall(r'"(\w+)" -> (\d+)', text)):
        inputs[node].append(makers.get(array, ""))
    counts = Counter[str]()
    for node, name in names.items():
        if name in _RESHAPES:
            counts[name] += "Transpose" in inputs[node]
        elif name == "Concatenate":
            counts[name] += len(inputs[node])
        # Such as "View uint64".
        elif name.partition(" ")[0] not in _VIEWS:
            counts["Compiled" if name.startswith("Compiled") else name] += 1
    return +counts


@contextmanager
def counted_evaluations() -> Iterator[list[int]]:
    """Yield a list whose only entry counts the evaluations that the block requests from MLX.

    Waiting for a started evaluation does not count.
    """
    count, started = [0], list[Any]()
    evaluate, start = mx.eval, mx.async_eval

    def counted(*arrays: Any) -> None:
        count[0] += not any(arrays and arrays[0] is request for request in started)
        evaluate(*arrays)

    def counted_start(*arrays: Any) -> None:
        count[0] += 1
        started[:] = arrays
        start(*arrays)  # type: ignore[no-untyped-call]

    with _replaced(mx, eval=counted, async_eval=counted_start):
        yield count


@contextmanager
def _replaced(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _nothing_evaluated() -> Any:
    return _replaced(mx, eval=lambda *_: None, async_eval=lambda *_: None)


@contextmanager
def compiled_as_on_gpu() -> Iterator[None]:
    """Compile the functions that a GPU would compile, inside the block."""
    with _replaced(optimizer, compiles=lambda: True):
        yield


class _AttentionKernels(AttentionKernels):
    """The kernels around attention where launches are counted; elsewhere MLX's operations."""

    def padded(self, *args: Any) -> tuple[mx.array, mx.array, mx.array]:
        return super().padded(*args) if _counts else plain_padded(*args)

    def packed(self, layout: Layout, output: mx.array) -> mx.array:
        return super().packed(layout, output) if _counts else plain_packed(layout, output)


# Not empty while launches are counted.
_counts: list[bool] = []


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Let models that are prepared inside the block have the package's kernels for GPUs."""
    around_attention = _AttentionKernels(CUDA, lambda **_: _launched)
    swiglu = GateKernels(lambda **_: _launched, metal=False).swiglu
    with (
        _replaced(operations, kernels_for=lambda _: lambda heads: around_attention),
        _replaced(gates, gate_kernels=lambda _: swiglu if _counts else None),
    ):
        yield


@contextmanager
def launched_kernels() -> Iterator[None]:
    """Inside the block, let each of these kernels be one primitive, whose results are no use."""
    _counts.append(True)
    try:
        yield
    finally:
        _counts.pop()


def _launched(
    *,
    inputs: list[mx.array],
    output_shapes: list[tuple[int, ...]],
    output_dtypes: list[mx.Dtype],
    **_: Any,
) -> list[mx.array]:
    """Return outputs that depend on all inputs, made by one primitive that counts as a launch."""
    sizes = [math.prod(shape) for shape in output_shapes]
    (before,) = mx.depends([mx.broadcast_to(_ZERO[output_dtypes[0]], (sum(sizes),))], inputs)
    made, start, outputs = mx.erfinv(before), 0, []
    for shape, size in zip(output_shapes, sizes, strict=True):
        outputs.append(made[start : start + size].reshape(shape))
        start += size
    return outputs


def _fused() -> Any:
    """Replace each of MLX's fused functions with one primitive per direction, as on a GPU.

    The replacements are scans, which MLX does not compile into other operations.
    """
    norm = _stand_in(mx.cumsum, mx.cumprod)
    return _replaced(
        mx.fast,
        rms_norm=norm,
        layer_norm=norm,
        rope=_stand_in(mx.cummax, mx.cummax),
        scaled_dot_product_attention=_stand_in(mx.cummin, mx.logcumsumexp),
        cross_entropy=_stand_in(mx.logsumexp, mx.softmax),
    )


def _stand_in(
    forward: Callable[..., mx.array], backward: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    @mx.custom_function
    def function(*arrays: mx.array) -> mx.array:
        made = forward(mx.depends(arrays[0], list(arrays)), axis=-1)
        # Attention's values may be narrower than its queries.
        if len(arrays) > 2 and arrays[2].ndim == made.ndim == 4:
            made = mx.broadcast_to(made[..., :1], (*made.shape[:-1], arrays[2].shape[-1]))
        return made

    @function.vjp
    def function_vjp(primals: Any, cotangent: mx.array, _: Any) -> Any:
        arrays = [primals] if isinstance(primals, mx.array) else list(primals)
        first = backward(mx.depends(arrays[0], [cotangent, *arrays]), axis=-1)
        rest = [mx.depends(array, [first]) for array in arrays[1:]]
        return [first, *rest] if rest else first

    def call(*args: Any, **options: Any) -> mx.array:
        given = [option for option in (*args, *options.values()) if isinstance(option, mx.array)]
        return cast(mx.array, function(*given))

    return call
