"""The rows that a run trained on, and damage to their file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from mlxtune.core.run.run_folder import TRAINED_ROWS
from mlxtune.core.run.trained_rows import as_bytes, read_trained_rows, rows_behind

IDENTITIES = np.array([7, 2**64 - 1, 3, 7], dtype=np.uint64)


def write_checkpoint(run: Path, content: bytes) -> None:
    """Write the parts of a checkpoint that has the hash of trained_rows.bin."""
    (run / "best").mkdir()
    (run / "best" / "manifest.json").write_text("{}")
    hashes = {TRAINED_ROWS: hashlib.sha256(content).hexdigest()}
    (run / "best" / "metadata.json").write_text(json.dumps({"records": hashes}))


def test_identities_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / TRAINED_ROWS).write_bytes(as_bytes(IDENTITIES))
    write_checkpoint(tmp_path, as_bytes(IDENTITIES))
    assert read_trained_rows(tmp_path, pytest.fail).tolist() == [3, 7, 2**64 - 1]


@pytest.mark.parametrize("kept", [slice(0), slice(-3), slice(-8), slice(8, None), None])
def test_damaged_file_is_a_warning(tmp_path: Path, kept: slice | None) -> None:
    if kept is not None:
        (tmp_path / TRAINED_ROWS).write_bytes(as_bytes(IDENTITIES)[kept])
    warnings: list[str] = []
    assert read_trained_rows(tmp_path, warnings.append).tolist() == []
    (warning,) = warnings
    assert warning.startswith(f"{tmp_path / TRAINED_ROWS} is missing or damaged, so rows that")


@pytest.mark.parametrize("of_checkpoint", [b"others", None])
def test_rows_count_only_as_far_as_a_checkpoint_confirms_them(
    tmp_path: Path, of_checkpoint: bytes | None
) -> None:
    (tmp_path / TRAINED_ROWS).write_bytes(as_bytes(IDENTITIES))
    if of_checkpoint is not None:
        write_checkpoint(tmp_path, of_checkpoint)
    warnings: list[str] = []
    read = read_trained_rows(tmp_path, warnings.append)
    assert len(read) == (3 if of_checkpoint is None else 0)
    (warning,) = warnings
    assert ("no checkpoint is left" if of_checkpoint is None else "another hash") in warning


def test_rows_count_for_an_adapter_next_to_a_continuing_run(tmp_path: Path) -> None:
    adapter, run = tmp_path / "adapters.safetensors", tmp_path / "checkpoints"
    run.mkdir()
    adapter.write_bytes(b"weights")
    for name in ("run.json", "metrics.jsonl"):
        (run / name).write_text("{}")
    (run / TRAINED_ROWS).write_bytes(as_bytes(IDENTITIES))
    write_checkpoint(run, as_bytes(IDENTITIES))
    assert len(rows_behind(adapter, pytest.fail)) == 3
    (run / "result.json").write_text('{"sha256": "of another adapter"}')
    assert len(rows_behind(adapter, pytest.fail)) == 0
