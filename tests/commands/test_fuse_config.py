"""The config.json of a fused model: keys of transformers 5 stay, and mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import mlx.core as mx
import pytest
from mlx_lm.utils import load

from mlxtune import FuseConfig, GenerateConfig, fuse, generate
from mlxtune.backend.models.loading import load_base
from tests.models import write_model
from tests.serve.served import write_adapter
from tests.slow import slow_except

ROPE: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_type": "default", "rope_theta": 50.0},
    "gemma3_text": {
        "full_attention": {"rope_type": "default", "rope_theta": 50.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
    },
}


TOKENS = mx.arange(48)[None] % 300


def logits(folder: Path) -> mx.array:
    return load_base(folder, "float32").model(TOKENS)


@pytest.mark.parametrize("kind", slow_except(ROPE, "gemma3_text"))
def test_rope_parameters_stay_and_give_the_same_answers(tmp_path: Path, kind: str) -> None:
    model, fused = write_model(tmp_path / "model", kind), tmp_path / "fused"
    path = model / "config.json"
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    config = {
        name: value for name, value in json.loads(path.read_text()).items() if name not in old
    }
    path.write_text(json.dumps(config | {"rope_parameters": ROPE[kind]}))
    adapter = write_adapter(tmp_path / "out", 1, model)

    fuse(FuseConfig(str(adapter), output=str(fused), quiet=True))

    written = json.loads((fused / "config.json").read_text())
    assert written["rope_parameters"] == ROPE[kind]
    asked: dict[str, Any] = {"prompt": "What is 3 + 21?", "max_new_tokens": 8, "quiet": True}
    answers = [
        generate(GenerateConfig(str(model), adapter=str(adapter), **asked)).text,
        generate(GenerateConfig(str(fused), **asked)).text,
    ]
    assert answers[0] == answers[1]
    same = logits(fused)
    # mlx-lm reads the folder as we do.
    model_of_mlx_lm, _ = load(str(fused))
    assert mx.array_equal(model_of_mlx_lm(TOKENS), same).item()
    (fused / "config.json").write_text(
        json.dumps(written | {"rope_parameters": {"rope_theta": 7.0}})
    )
    assert not mx.array_equal(logits(fused), same).item()
