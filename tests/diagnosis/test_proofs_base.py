"""The base in 4 bits that `doctor --prove` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.backend.models.loading import load_base
from mlxtune.diagnosis.proofs import write_base
from tests.paths import DATA


@pytest.mark.parametrize("width", [128])
def test_base_is_loaded_by_mlx_lm_in_4_bits_and_the_same_each_time(
    tmp_path: Path, width: int
) -> None:
    from mlx_lm.utils import load

    for name in ("a", "b"):
        write_base(DATA / "demo-qwen3", tmp_path / name, width)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]
    model, tokenizer = load(str(tmp_path / "a"))
    assert model.model.layers[0].self_attn.q_proj.bits == 4
    assert tokenizer.encode("a table")
    base = load_base(tmp_path / "a", "float32")
    assert base.hidden_size == width
    assert base.quantization
