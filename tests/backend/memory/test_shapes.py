"""A model's shapes, read before its weights, and its predicted peaks."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.cpu import CPU
from mlxtune.backend.cpu.kernel_layers import KernelMemory
from mlxtune.backend.device.allocator import peak_of, release
from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.lora.apply import apply_lora
from mlxtune.backend.memory.measure import measure
from mlxtune.backend.memory.shapes import model_shapes
from mlxtune.backend.models.loading import BaseModel, load_base, open_base, read_weights
from mlxtune.backend.models.quantize import FORMATS
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.config.data_config import BaseOptions
from mlxtune.core.data.encode import Example
from mlxtune.core.formatting import byte_size
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.graph_memory import GraphMemory
from mlxtune.core.steps.memory_plan import ESTIMATE_RANGE, least, predict, remedies
from mlxtune.core.steps.memory_terms import BatchLoad, load_of
from mlxtune.core.steps.pack import StepLengths
from mlxtune.errors import ModelError
from tests.experts import EXPERTS
from tests.long.architectures import ARCHITECTURES
from tests.models import MODEL_TYPES, write_model
from tests.slow import long, long_except, slow

# True uses the CPU's kernels, False MLX's operations.
EXECUTIONS = {True: Execution(CPU, 10**6), False: Execution(MLX, 10**6)}
# The layers are so large that uncounted memory is negligible.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "vocab_size": 6000,
}


TRAINED = [(("all",), None), long(("all",), 4), long(("q_proj", "v_proj"), None)]
TRAINED += [(("q_proj", "v_proj"), 4)]


@pytest.mark.parametrize("architecture", MODEL_TYPES)
@pytest.mark.parametrize(("targets", "quantize"), TRAINED)
def test_shapes_match_the_loaded_model(
    tmp_path: Path, architecture: str, targets: tuple[str, ...], quantize: int | None
) -> None:
    folder = write_model(tmp_path / "model", architecture, dtype="bfloat16", quantize=quantize)
    config = InstructConfig(lora_rank=4, targets=targets, num_layers=1)
    shapes = model_shapes(open_base(folder, "float32"), config, GraphMemory())

    model = load_base(folder, "float32").model
    assert shapes.weights == sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    assert shapes.trainable == apply_lora(model, config).trainable_parameters
    # Widths: q 64, k and v 32 (two KV heads of 16), o 64; gate and up 96, down 64.
    assert (shapes.layers, shapes.matmuls, shapes.widest_matmul) == (1, 448, 96)
    # Only the CPU casts a head's weights for its products, and copies dequantised ones.
    copies = (4 if quantize else 1) if on_cpu() else 0
    itemsize = 2 if on_cpu() else 4
    stored = (0 if quantize else itemsize, copies * 320 * 64)
    assert (shapes.stored_itemsize, shapes.head_cast) == stored
    assert shapes.plain_head == (architecture != "gemma2" and (on_cpu() or not quantize))


@pytest.mark.parametrize(
    "member",
    [
        {"dora": True},
        {"target_rank": ("q_proj=9", "1.mlp.up_proj=2")},
        {"init": "pissa", "target_rank": ("v_proj=2",)},
    ],
)
def test_trained_parameters_of_the_family_are_counted(
    tmp_path: Path, member: dict[str, Any]
) -> None:
    folder = write_model(tmp_path / "model", "qwen3")
    config = InstructConfig(lora_rank=4, targets=("all",), **member)
    shapes = model_shapes(open_base(folder, "float32"), config, GraphMemory())
    model = load_base(folder, "float32").model
    plain = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    trained = apply_lora(model, config).trainable_parameters
    assert shapes.trainable == trained
    assert shapes.weights == plain + (4 * trained if "init" in member else 0)


def test_gathered_inputs_of_experts_count_in_a_layer(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3_moe", **EXPERTS["qwen3_moe"])
    shapes = model_shapes(open_base(folder, "float32"), InstructConfig(), KernelMemory())
    # Each token runs two experts, whose inputs are 64, 64 and 32 wide.
    assert shapes.layer_matmuls == shapes.matmuls / shapes.layers + 2 * (64 + 64 + 32)


def test_opening_a_model_reads_no_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", **SHAPE)
    gc.collect()
    before = mx.get_active_memory()
    base = open_base(folder, "float32")
    model_shapes(base, InstructConfig(), KernelMemory())
    assert mx.get_active_memory() - before < 1_000_000
    read_weights(base)
    assert mx.get_active_memory() - before > 10_000_000


def test_wrong_targets_are_found_before_the_weights_are_read(tmp_path: Path) -> None:
    base = open_base(write_model(tmp_path / "model", "qwen3"), "float32")
    with pytest.raises(ModelError, match="did you mean"):
        model_shapes(base, InstructConfig(targets=("qproj",)), KernelMemory())
    with pytest.raises(ModelError, match="has 2 layers"):
        model_shapes(base, InstructConfig(num_layers=9), KernelMemory())


def examples(count: int, length: int, prefix: int = 0) -> list[Example]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 300, prefix)
    mask = np.zeros(prefix + length + 1, dtype=np.uint8)
    mask[-20:] = 1
    return [
        Example(i, np.concatenate([shared, rng.integers(0, 300, length + 1)]).astype("i4"), mask)
        for i in range(count)
    ]


def check_peak(
    base: BaseModel, config: InstructConfig, how: Execution, step: list[Example]
) -> None:
    """Check a step's predicted peaks against its measured peak, on an opened model."""
    case = case_of(base, config, how, step)
    estimated, corrected = case.estimated / case.measured, case.corrected / case.measured
    assert ESTIMATE_RANGE[0] <= estimated <= ESTIMATE_RANGE[1]
    assert 0.95 <= corrected <= 1.25


@dataclass(frozen=True)
class Case:
    """A step's peak in bytes: estimated from sizes, corrected by short passes, and measured."""

    estimated: int
    corrected: int
    measured: int


def case_of(base: BaseModel, config: InstructConfig, how: Execution, step: list[Example]) -> Case:
    """Predict and measure a step's peak on an opened model, whose weights are then read."""
    shapes = model_shapes(base, config, how.operations.memory)
    release()  # frees memory of earlier tests
    elsewhere = mx.get_active_memory()
    read_weights(base)
    pipeline = InstructPipeline(base.model, config, execution=how)
    (group,) = [group for group, _ in pipeline._engine.micro_batches.iterate(step)]
    found = measure(pipeline, shapes, [how.recompute])
    load = load_of(group, StepLengths.of(step))
    release()
    resident = mx.get_active_memory() - elsewhere
    # The lowest of three peaks, because a busy device lags and keeps more memory.
    measured = min(_peak_of_step(pipeline, step, numpy=how.operations is CPU) for _ in range(3))
    return Case(
        estimated=predict(shapes, how, load).total,
        corrected=predict(replace(shapes, measured=found), how, load).total,
        measured=resident + measured,
    )


def _peak_of_step(pipeline: InstructPipeline, step: list[Example], *, numpy: bool) -> int:
    """Return a step's peak above the memory before it; `numpy` includes numpy's arrays."""
    tracemalloc.start()
    try:
        peak = peak_of(lambda: pipeline.train_batch(step))
        # MLX does not count numpy's arrays.
        return peak + (tracemalloc.get_traced_memory()[1] if numpy else 0)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kernels", "recompute"), [(True, False), *map(long, (True, False, False), (True, True, False))]
)
@pytest.mark.parametrize(
    ("step", "changes"),
    [
        long(examples(4, 128), {}, id="short"),
        long(examples(1, 1024), {}, id="long"),
        pytest.param(examples(4, 64, prefix=200), {}, id="prefix"),
        long(examples(4, 128), {"tie_word_embeddings": False}, id="untied"),
        long(examples(4, 128), {"targets": ("all",)}, id="all"),
        long(examples(4, 128), {"targets": ("all",), "num_layers": 2}, id="last layers"),
        long(examples(4, 128), {"targets": ("all",), "dora": True}, id="DoRA"),
        long(
            examples(4, 128),
            {"targets": ("all",), "init": "pissa", "target_rank": ("up_proj=64",)},
            id="PiSSA",
        ),
    ],
)
def test_predicted_peak_is_near_the_measured(
    tmp_path: Path, kernels: bool, recompute: bool, step: list[Example], changes: dict[str, Any]
) -> None:
    model = {name: value for name, value in changes.items() if name.startswith("tie")}
    lora = {name: value for name, value in changes.items() if name not in model}
    folder = write_model(tmp_path / "model", "qwen3", dtype="bfloat16", **SHAPE | model)
    base, config = open_base(folder, "float32"), InstructConfig(lora_rank=8, **lora)
    how = replace(EXECUTIONS[kernels], recompute=recompute)
    check_peak(base, config, how, step)


MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
DELTA |= {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_hidden_layers": 8}
DELTA |= {"tie_word_embeddings": True}

RWKV = ARCHITECTURES["rwkv7"] | {"head_dim": 64, "num_hidden_layers": 3}
RWKV |= {"targets": ("r_proj", "v_proj")}
MAMBA = ARCHITECTURES["mamba"] | {"targets": ("all",)}
LATENT = ARCHITECTURES["deepseek_v3"] | {"num_hidden_layers": 4, "targets": ("all",)}


@pytest.mark.parametrize("recompute", [long(False), True])
@pytest.mark.parametrize(
    ("architecture", "step", "changes"),
    [
        slow("gpt_oss", examples(2, 200), {"sliding_window": 64, **MOE}, id="sinks"),
        long("gemma3_text", examples(2, 300), {"sliding_window": 64}, id="window passed"),
        long("gemma3_text", examples(2, 300), {"sliding_window": 512}, id="window not passed"),
        long("gemma2", examples(2, 300), {}, id="capped scores"),
        long("qwen3", examples(2, 300), {"head_dim": 80}, id="odd heads"),
        long("qwen3", examples(2, 300), {"dropout": 0.1}, id="dropout"),
        long("phi3", examples(2, 300), {"targets": ("all",)}, id="packed projections"),
        long("qwen3_5", examples(4, 64, prefix=200), DELTA, id="recurrences"),
        long("qwen3_5", examples(1, 1024), DELTA, id="long recurrences"),
        long("rwkv7", examples(2, 60, prefix=40), RWKV, id="RWKV 7"),
        long("mamba", examples(2, 60, prefix=40), MAMBA, id="Mamba"),
    ],
)
def test_predicted_graph_peak_is_near_measured_in_all_architectures(
    tmp_path: Path,
    architecture: str,
    step: list[Example],
    changes: dict[str, Any],
    recompute: bool,
) -> None:
    how = replace(EXECUTIONS[False], recompute=recompute)
    check_architecture(tmp_path / "model", architecture, step, changes, how)


@pytest.mark.parametrize(
    ("architecture", "step", "changes"),
    [
        long("gemma2", examples(1, 700), {}, id="capped scores"),
        slow("deepseek_v3", examples(1, 700), LATENT, id="added scores"),
    ],
)
def test_predicted_kernel_peak_is_near_measured_in_all_architectures(
    tmp_path: Path, architecture: str, step: list[Example], changes: dict[str, Any]
) -> None:
    check_architecture(tmp_path / "model", architecture, step, changes, EXECUTIONS[True])


def check_architecture(
    folder: Path, architecture: str, step: list[Example], changes: dict[str, Any], how: Execution
) -> None:
    lora = {name: value for name, value in changes.items() if name in ("dropout", "targets")}
    model = {name: value for name, value in changes.items() if name not in lora}
    write_model(folder, architecture, dtype="bfloat16", **SHAPE | model)
    check_peak(open_base(folder, "float32"), InstructConfig(lora_rank=8, **lora), how, step)


@pytest.mark.parametrize("architecture", long_except(["qwen3", "llama", "gemma3_text"], "qwen3"))
def test_bytes_of_quantized_weights_are_predicted_before_reading(
    tmp_path: Path, architecture: str
) -> None:
    folder = write_model(tmp_path / "model", architecture, dtype="bfloat16")
    for name, double in [*((name, False) for name in FORMATS), ("nf4", True)]:
        base = open_base(folder, "auto", BaseOptions(quantize=name, double_quant=double))
        predicted = model_shapes(base, InstructConfig(), GraphMemory())
        read_weights(base)
        found = sum(value.nbytes for _, value in tree_flatten(base.model.parameters()))
        assert predicted.weights == found, name
        assert predicted.unpacked > 0 or not on_cpu()
        assert predicted.stored_itemsize == 0


def test_advice_knows_what_quantizing_would_take(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", dtype="bfloat16", **SHAPE)
    config, load, way = InstructConfig(lora_rank=8), BatchLoad.single(512, 100), Execution(CPU)
    shapes = model_shapes(open_base(folder, "float32"), config, KernelMemory())
    advice = remedies(shapes, way, load, 1, may_checkpoint=False)[-1]
    quantized = model_shapes(
        open_base(folder, "float32", BaseOptions(quantize="4")), config, KernelMemory()
    )
    needed = least(replace(shapes, weights=quantized.weights), way, load).total
    assert advice.startswith(f"--quantize 4 (about {byte_size(needed)}")


MEASURED = ("4", "nvfp4", "nf4")


@pytest.mark.parametrize(
    ("quantize", "kernels"),
    [(slow if each == ("4", False) else long)(*each) for each in product(MEASURED, (True, False))],
)
def test_predicted_peak_on_a_quantized_base_is_near_the_measured(
    tmp_path: Path, kernels: bool, quantize: str
) -> None:
    folder = write_model(tmp_path / "model", "qwen3", dtype="bfloat16", **SHAPE)
    base = open_base(folder, "float32", BaseOptions(quantize=quantize))
    config, step = InstructConfig(lora_rank=8, targets=("all",)), examples(4, 128)
    check_peak(base, config, EXECUTIONS[kernels], step)
