"""Adapters on a base model: their outputs, and errors for adapters that do not fit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxtune import TrainConfig, train
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import load_adapted
from mlxtune.backend.models.loading import load_base
from mlxtune.errors import ModelError
from tests.experts import EXPERTS
from tests.models import sums, write_adapter_config, write_chat, write_model
from tests.slow import slow

TOKENS = [[5, 17, 80, 3]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the folder of an adapter that was trained on this model."""
    folder = tmp_path_factory.mktemp("trained")
    model = write_model(folder / "model", "qwen3")
    rows = write_chat(folder / "chat.jsonl", sums(20))
    output = folder / "out" / "adapters.safetensors"
    train(TrainConfig(str(model), str(rows), output=str(output), lr=1e-2, samples=0, quiet=True))
    return model, output.parent


def logits(model: object) -> np.ndarray:
    return np.array(model(mx.array(TOKENS)))  # type: ignore[operator]


def test_adapted_model_matches_mlx_lm(trained: tuple[Path, Path]) -> None:
    from mlx_lm.utils import load

    model, adapter = trained
    ours = load_adapted(load_base(model, "float32"), AdapterFile.find(str(adapter)))
    theirs, _ = load(str(model), adapter_path=str(adapter))
    np.testing.assert_allclose(logits(ours.model), logits(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ["gpt_oss", slow("qwen3_5_moe"), slow("qwen3_moe")])
def test_expert_adapter_loads_in_mlx_lm(tmp_path: Path, architecture: str) -> None:
    from mlx_lm.utils import load

    model = write_model(tmp_path / "model", architecture, **EXPERTS[architecture])
    rows = write_chat(tmp_path / "chat.jsonl", sums(8))
    output = tmp_path / "out" / "adapters.safetensors"
    options = {"targets": ["all"], "rslora": True, "lr_ratio": 4.0, "lr": 1e-2, "max_steps": 2}
    train(
        TrainConfig(str(model), str(rows), output=str(output), val_split=0, quiet=True, **options)
    )
    shapes = {value.shape for value in mx.load(str(output)).values() if value.ndim == 3}
    assert {shape[0] for shape in shapes} == {4}
    ours = load_adapted(load_base(model, "float32"), AdapterFile.find(str(output)))
    theirs, _ = load(str(model), adapter_path=str(output.parent))
    # On some CPUs, the two models' products round differently.
    np.testing.assert_allclose(logits(ours.model), logits(theirs), rtol=1e-5, atol=1e-5)
    plain = load_base(model, "float32")
    assert np.abs(logits(theirs) - logits(plain.model)).max() > 0.01


def test_adapter_is_removed_and_reattached(trained: tuple[Path, Path]) -> None:
    model, adapter = trained
    plain = logits(load_base(model, "float32").model)
    adapted = load_adapted(load_base(model, "float32"), AdapterFile.find(str(adapter)))
    on = logits(adapted.model)
    adapted.use_adapter(False)
    np.testing.assert_array_equal(logits(adapted.model), plain)
    adapted.use_adapter(True)
    np.testing.assert_array_equal(logits(adapted.model), on)
    assert np.abs(on - plain).max() > 0.01


def test_adapter_may_be_links_as_in_the_cache_of_hugging_face(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    model, adapter = trained
    for name in ("adapters.safetensors", "adapter_config.json"):
        (tmp_path / name).symlink_to(adapter / name)
    ours = load_adapted(load_base(model, "float32"), AdapterFile.find(str(tmp_path)))
    theirs = load_adapted(load_base(model, "float32"), AdapterFile.find(str(adapter)))
    np.testing.assert_array_equal(logits(ours.model), logits(theirs.model))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type 'full'"),
        ({"lora_parameters": None}, "is not supported"),
        ({"lora_parameters": {"rank": "x", "scale": 2.0}}, "has no valid rank and scale"),
        ({"lora_parameters": {"rank": 8}}, "has no valid rank and scale"),
        ({"lora_parameters": {"rank": 8, "scale": "2"}}, "has no valid rank and scale"),
        ({"lora_parameters": {"rank": 8.5, "scale": 2.0}}, "has no valid rank and scale"),
    ],
)
def test_empty_config_is_an_error(
    trained: tuple[Path, Path], tmp_path: Path, change: dict[str, object], said: str
) -> None:
    model, adapter = trained
    shutil.copy(adapter / "adapters.safetensors", tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    write_adapter_config(tmp_path, config | change)
    with pytest.raises(ModelError, match=said):
        load_adapted(load_base(model, "float32"), AdapterFile.find(str(tmp_path)))


@pytest.mark.parametrize("rank", [4, 10**6, 10**400])
def test_rank_that_differs_from_the_tensors_allocates_nothing(
    trained: tuple[Path, Path], tmp_path: Path, rank: int
) -> None:
    model, adapter = trained
    shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["lora_parameters"]["rank"] = rank
    write_adapter_config(tmp_path / "adapter", config)
    with pytest.raises(ModelError, match=r"gives rank|no valid rank|more than 100 digits"):
        load_adapted(load_base(model, "float32"), AdapterFile.find(str(tmp_path / "adapter")))


def test_adapter_of_another_model_is_an_error(trained: tuple[Path, Path], tmp_path: Path) -> None:
    _, adapter = trained
    other = write_model(tmp_path / "other", "qwen3", hidden_size=32)
    with pytest.raises(ModelError) as raised:
        load_adapted(load_base(other, "float32"), AdapterFile.find(str(adapter)))
    # The message names one tensor and counts the others.
    assert re.fullmatch(
        f".*: was trained on another model, {trained[0]}, and does not fit the model: "
        r"\S+ is \(64, 8\), but the model needs \(32, 8\), and \d+ more: "
        "name the right base with --model-path",
        str(raised.value),
    )
