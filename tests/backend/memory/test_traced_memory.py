"""What the layers of a model take, as their graph tells without being computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.memory.traced_memory import TracedLayers
from mlxtune.backend.models.loading import open_base
from mlxtune.config import InstructConfig
from mlxtune.core.steps.execution import LayersUse
from mlxtune.core.steps.liveness import terms
from tests.long.memory_table import on_a_gpu
from tests.models import write_model

# Wide heads, as the kernels of a GPU want them.
SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 64, "vocab_size": 96}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}


@pytest.fixture
def gpu() -> Iterator[None]:
    with on_a_gpu():
        yield


def traced(folder: Path, architecture: str, width: int = 32, **changes: Any) -> list[LayersUse]:
    """Return what the layers of a model take, packed; changes are its config's or LoRA's."""
    targets, packs = changes.pop("targets", ("q_proj", "v_proj")), changes.pop("packs", True)
    base = open_base(write_model(folder, architecture, **SHAPE | changes), "float32")
    return list(TracedLayers(base, InstructConfig(lora_rank=4, targets=targets))(packs, width))


def scores(use: LayersUse) -> float:
    """Return the copies of float32 scores of 4 heads that each layer keeps."""
    return float(use.kept[3]) / (4 * 4)


@pytest.mark.usefixtures("gpu")
def test_fused_attention_keeps_no_scores(tmp_path: Path) -> None:
    (use,) = traced(tmp_path, "qwen3")
    assert scores(use) == 0
    assert not use.working[:, 3].any()


@pytest.mark.usefixtures("gpu")
def test_examples_past_a_window_keep_scores_in_the_layers_that_have_it(tmp_path: Path) -> None:
    short = traced(tmp_path / "short", "gemma3_text", width=8)
    assert [use.layers for use in short] == [3]
    assert scores(short[0]) == 0
    # The window is 8 in two layers of three.
    sliding, full = sorted(traced(tmp_path / "long", "gemma3_text", width=9), key=scores)[::-1]
    assert (sliding.layers, full.layers) == (2, 1)
    assert scores(sliding) >= 1
    assert scores(full) == 0


@pytest.mark.usefixtures("gpu")
def test_sinks_in_windows_and_odd_heads_keep_scores(tmp_path: Path) -> None:
    # Without a window, a sink is one more key of the fused kernel.
    sliding, full = sorted(traced(tmp_path / "sinks", "gpt_oss", **GPT_OSS), key=scores)[::-1]
    assert scores(sliding) >= 1
    assert scores(full) == 0
    (small,) = traced(tmp_path / "small", "qwen3", head_dim=32)
    assert scores(small) >= 1


def test_cpu_keeps_the_scores_of_all_layers(tmp_path: Path) -> None:
    (use,) = traced(tmp_path, "qwen3")
    assert scores(use) >= 1


@pytest.mark.usefixtures("gpu")
def test_queries_keys_and_values_are_counted_on_the_line_and_side_by_side(tmp_path: Path) -> None:
    (packed,) = traced(tmp_path / "packed", "qwen3", targets=("all",))
    (padded,) = traced(tmp_path / "padded", "qwen3", targets=("all",), packs=False)
    # What norms of queries and keys need, and attention: the normed ones, the values, its result:
    # 4 heads, and 2 of keys and of values, of 64 in float32.
    assert packed.kept[2] == 4 * 64 * (2 * (4 + 2) + 2 + 4)
    # All the rest stands on the line.
    assert packed.kept[1] == padded.kept[2] - packed.kept[2]


@pytest.mark.usefixtures("gpu")
def test_layer_that_runs_again_works_with_what_it_would_keep(tmp_path: Path) -> None:
    (use,) = traced(tmp_path, "qwen3")
    load = terms(tokens=2000, lines=4, width=500)
    assert (use.again @ load).max() >= use.kept @ load


def test_nothing_is_computed_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    base = open_base(write_model(tmp_path, "llama", **SHAPE), "float32")
    names = [name for name, _ in base.model.named_modules()]
    before = mx.get_active_memory()
    assert TracedLayers(base, InstructConfig(targets=("all",), dora=True))(True, 32)
    assert mx.get_active_memory() - before < 10_000
    assert [name for name, _ in base.model.named_modules()] == names


def test_layers_of_a_kind_that_cannot_be_run_apart_are_not_traced(tmp_path: Path) -> None:
    base = open_base(write_model(tmp_path, "llama", **SHAPE), "float32")
    base.model.model.layers[0].__class__ = type("Pair", (type(base.model.model.layers[0]),), {})
    type(base.model.model.layers[0]).__call__ = lambda *_, **__: (None, None)
    base.model.model.layers[1] = base.model.model.layers[0]
    assert TracedLayers(base, InstructConfig())(True, 32) == []


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("all",)])
def test_trained_experts_are_traced(tmp_path: Path, targets: tuple[str, ...]) -> None:
    assert traced(tmp_path, "gpt_oss", targets=targets, **GPT_OSS)
