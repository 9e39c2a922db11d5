"""LoRA's whole family on every kind of base: trained, judged, fused, exported and imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from mlx_lm.utils import load

from mlxtune import (
    EvalConfig,
    ExportConfig,
    FuseConfig,
    ImportConfig,
    TrainConfig,
    evaluate,
    export,
    fuse,
    import_adapter,
    train,
)
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import load_adapted
from mlxtune.backend.models.loading import load_base
from mlxtune.errors import ModelError
from tests.models import sums, write_chat, write_model
from tests.slow import long, slow

TOKENS = [[5, 17, 80, 3, 44, 12]]
MEMBERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
    "ranks": {"target_rank": ("q_proj=3", "down_proj=6")},
}
BASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "4-bit": {"dtype": "bfloat16", "quantize": 4},
}


# Each member and each base at least once; pairs that are less common are slow or long.
PAIRS = [
    ("lora", "float32"),
    *(slow("dora", "bfloat16"), slow("pissa", "4-bit")),
    *(long("rslora", "bfloat16"), long("ranks", "float32"), long("dora", "4-bit")),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind, next to a file of conversations."""
    made = {}
    for name, how in BASES.items():
        folder = tmp_path_factory.mktemp(name)
        write_chat(folder / "chat.jsonl", sums(16))
        made[name] = write_model(folder / "model", "llama", **how)
    return made


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array(TOKENS)).astype(mx.float32))


@pytest.mark.parametrize(("member", "kind"), PAIRS)
def test_adapter_survives_export_and_import(
    bases: dict[str, Path], tmp_path: Path, member: str, kind: str
) -> None:
    base = bases[kind]
    chat, adapter = str(base.parent / "chat.jsonl"), tmp_path / "out"
    config = {"output": str(adapter / "adapters.safetensors"), "lr": 1e-2, "rank": 4}
    shared: dict[str, Any] = {**config, "quiet": True, "samples": 0, "targets": ("all",)}
    train(TrainConfig(str(base), (chat,), **shared, **MEMBERS[member]))
    judged = evaluate(EvalConfig(str(base), adapter=str(adapter), data=(chat,), quiet=True))
    # The verdict needs rows that were not trained on.
    assert judged.difference is not None and judged.difference.high < 0
    trained = logits(load_adapted(load_base(base, "float32"), AdapterFile.find(str(adapter))).model)

    fused = fuse(FuseConfig(adapter=str(adapter), output=str(tmp_path / "fused"), quiet=True))
    assert not fused.certificate.problems
    assert np.isfinite(logits(load(str(tmp_path / "fused"))[0])).all()

    given: dict[str, Any] = {"adapter": str(adapter), "quiet": True}
    for format in ("mlx-lm", "peft", "flat"):
        output = str(tmp_path / format)
        outgoing = ExportConfig(output=output, format=format, **given)
        if member == "dora" and format == "flat":
            with pytest.raises(ModelError, match="DoRA"):
                export(outgoing)
            continue
        assert not export(outgoing).certificate.problems
    dora = [
        name
        for name in safetensors.numpy.load_file(tmp_path / "peft/adapter_model.safetensors")
        if "lora_magnitude_vector" in name
    ]
    assert len(dora) == (14 if member == "dora" else 0)

    for format in ("mlx-lm", "peft"):
        back = ImportConfig(
            adapter=str(tmp_path / format),
            output=str(tmp_path / f"back-{format}"),
            model_path=str(base),
            quiet=True,
        )
        import_adapter(back)
        again = load_adapted(
            load_base(base, "float32"), AdapterFile.find(str(tmp_path / f"back-{format}"))
        )
        np.testing.assert_allclose(logits(again.model), trained, rtol=0, atol=1e-6)
    whole = [
        safetensors.numpy.load_file(folder / "adapters.safetensors")
        for folder in (adapter, tmp_path / "back-mlx-lm")
    ]
    assert whole[0].keys() == whole[1].keys()
    assert all(np.array_equal(whole[0][name], whole[1][name]) for name in whole[0])
    said = json.loads((tmp_path / "back-mlx-lm" / "adapter_config.json").read_text())
    assert said["fine_tune_type"] == ("dora" if member == "dora" else "lora")
