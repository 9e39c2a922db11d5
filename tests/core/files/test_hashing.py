"""The hash that tells one base model from another, and its cache."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from mlxtune.core.files import hashing
from mlxtune.core.files.hashing import (
    base_change,
    base_fingerprint,
    base_layout_hash,
    hash_in_background,
    is_fingerprint,
    model_hash,
)
from mlxtune.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model-1.safetensors").write_bytes(b"one" * 1000)
    (made / "model-2.safetensors").write_bytes(b"two" * 1000)
    (made / "README.md").write_text("says nothing of what it computes")
    return made


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read."""
    names: list[str] = []
    whole = hashing.file_hash

    def file_hash(path: Path) -> str:
        names.append(path.name)
        return whole(path)

    monkeypatch.setattr(hashing, "file_hash", file_hash)
    return names


def test_hash_is_over_names_and_contents_of_config_and_weights(folder: Path) -> None:
    digest = hashlib.sha256()
    for name in ("config.json", "model-1.safetensors", "model-2.safetensors"):
        content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    expected = f"sha256:{digest.hexdigest()}"
    assert model_hash(folder, None) == expected
    assert hash_in_background(folder, None).result() == expected

    (folder / "README.md").write_text("something else")
    assert model_hash(folder, None) == expected
    (folder / "model-1.safetensors").rename(folder / "model-3.safetensors")
    assert model_hash(folder, None) != expected


def test_file_that_has_not_changed_is_read_once(
    folder: Path, tmp_path: Path, read: list[str]
) -> None:
    cache = tmp_path / "cache"
    first = model_hash(folder, cache)
    assert len(read) == 3
    assert model_hash(folder, cache) == first
    assert len(read) == 3

    # This change keeps the file's size, and the old time is restored.
    weights = folder / "model-1.safetensors"
    times = weights.stat()
    weights.write_bytes(b"ONE" * 1000)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_hash(folder, cache) != first
    assert read[3:] == ["model-1.safetensors"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', "[" * 100_000])
def test_damaged_cache_is_rebuilt(folder: Path, tmp_path: Path, content: str) -> None:
    expected = model_hash(folder, None)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "hashes.json").write_text(content)
    assert model_hash(folder, cache) == expected
    assert model_hash(folder, cache) == expected


def test_run_continues_without_an_unwritable_cache(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert model_hash(folder, tmp_path / "file" / "cache") == model_hash(folder, None)


def test_file_that_cannot_be_read_is_an_error_when_the_hash_is_asked_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    computing = hash_in_background(folder, None)
    with pytest.raises(ModelError, match="cannot be read"):
        computing.result()


def test_fingerprint_tells_weights_apart_but_not_how_they_are_stored(tmp_path: Path) -> None:
    def write(name: str, *files: dict[str, np.ndarray]) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        for number, tensors in enumerate(files):
            safetensors.numpy.save_file(tensors, tmp_path / name / f"model-{number}.safetensors")
        return base_fingerprint(tmp_path / name)

    rng = np.random.default_rng(0)
    matrix, norm, bias = (rng.standard_normal(n).astype("f4") for n in ((64, 64), 64, 2))
    whole = write("whole", {"q.weight": matrix, "norm.weight": norm, "q.bias": bias})
    parts = write("parts", {"q.weight": matrix}, {"norm.weight": norm, "q.bias": bias})
    assert parts == whole
    tuned = write("tuned", {"q.weight": matrix * 1.01, "norm.weight": norm, "q.bias": bias})
    assert base_change(whole, tuned) == "weights"
    codes = {"q.weight": np.ones((64, 8), "u4"), "q.scales": np.ones((64, 1), "f4")}
    quantized = write("codes", codes | {"norm.weight": norm, "q.bias": bias})
    assert base_change(whole, quantized) is None
    other = codes | {"norm.weight": norm + 1, "q.bias": bias}
    assert base_change(whole, write("other", other)) == "weights"
    (tmp_path / "whole" / "model-0.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match="cannot be read"):
        base_fingerprint(tmp_path / "whole")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model of one large matrix, and a config with nested values."""
    folder = tmp_path / "base"
    folder.mkdir()
    config = {"rope_theta": 10000, "text_config": {"rms_norm_eps": 1e-6}, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    matrix = np.random.default_rng(0).standard_normal((256, 256)).astype("f4")
    safetensors.numpy.save_file({"q.weight": matrix}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("eighth", range(8))
def test_change_of_any_eighth_of_a_weight_changes_the_fingerprint(base: Path, eighth: int) -> None:
    before, path = base_fingerprint(base), base / "model.safetensors"
    matrix = safetensors.numpy.load_file(path)["q.weight"].reshape(-1)
    matrix[eighth * 8192 : (eighth + 1) * 8192] *= -1
    safetensors.numpy.save_file({"q.weight": matrix.reshape(256, 256)}, path)
    after = base_fingerprint(base)
    assert base_change(before, after) == "weights"
    assert after["layout"] == before["layout"] == base_layout_hash(base)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope_theta": 50}, "rope_theta in config.json"),
        ({"rope_theta": 10000.0}, None),
        ({"text_config": {"rms_norm_eps": 0.9}}, "text_config.rms_norm_eps in config.json"),
        ({"text_config": {}}, "text_config.rms_norm_eps in config.json"),
        ({"rope_scaling": {"factor": 4}}, "rope_scaling.factor in config.json"),
        ({"rope_scaling": None}, None),
        ({"eos_token_id": 4, "torch_dtype": "float16"}, None),
        ({"quantization": {"bits": 4}}, None),
    ],
)
def test_hash_covers_only_config_keys_that_change_results(
    base: Path, change: dict[str, Any], expected: str | None
) -> None:
    before, path = base_fingerprint(base), base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    after = base_fingerprint(base)
    assert base_change(before, after) == expected
    first = {name: before[name] for name in ("layout", "weights", "vectors")}
    assert is_fingerprint(before)
    assert is_fingerprint(first)
    assert base_change(first, after) is None
    assert not is_fingerprint(before | {"later": ""})
    assert not is_fingerprint(before | {"config": []})
