"""The number of Python frames between the command and the loss."""

from __future__ import annotations

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: split
import re
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.cli import COMMANDS
from mlxtune.core.steps.execution import Execution
from mlxtune.session import memory_planning
from tests.models import sums, write_chat, write_model
from tests.paths import DOCS

# The maximum number of frames from the command line's `train` to the caller of cross_entropy.
MAX_FRAMES = 10


def test_cross_entropy_is_few_frames_from_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count only mlxtune's own frames, in a step in bfloat16 as on a GPU."""
    train = next(command for command in COMMANDS if command.name == "train")
    assert isinstance(train.callback, FunctionType)
    start = train.callback.__code__
    stacks: list[list[str]] = []
    cross_entropy, best_execution = mx.fast.cross_entropy, memory_planning.best_execution

    def counted(logits: mx.array, targets: mx.array) -> mx.array:
        assert logits.dtype == mx.bfloat16
        frame, names = sys._getframe(1), []
        while True:
            module = frame.f_globals["__name__"]
            if module.startswith("mlxtune."):
                names.append(f"{module}.{frame.f_code.co_qualname}")
            if frame.f_code is start:
                break
            assert frame.f_back is not None
            frame = frame.f_back
        stacks.append(names[::-1])
        return cross_entropy(logits, targets)

    def on_gpu(parameters: int, dtype: str, *_: Any) -> Execution:
        return best_execution(parameters, dtype, "gpu")

    monkeypatch.setattr(mx.fast, "cross_entropy", counted)
    monkeypatch.setattr(memory_planning, "best_execution", on_gpu)
    folder = write_model(tmp_path / "model", "qwen3")
    chat = write_chat(tmp_path / "chat.jsonl", sums(8))
    output = tmp_path / "out" / "adapters.safetensors"
    arguments: list[Any] = ["--model-path", folder, "--data", chat, "--output", output]
    arguments += ["--max-steps", 1, "--dtype", "bfloat16", "--val-split", 0, "--samples", 0]
    train.main([*map(str, arguments), "--quiet"], standalone_mode=False)

    assert stacks
    deepest = max(stacks, key=len)
    assert len(deepest) <= MAX_FRAMES, "\n".join(deepest)
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("**A step**")[2].partition("**The learning rate**")[0]
    hops = re.findall(r"^\| .* \| `([\w/]+)\.py`, `(\w+)`", table, flags=re.MULTILINE)
    assert len(hops) == 7
    for path, name in hops:
        module = f"mlxtune.{path.replace('/', '.')}."
        assert any(each.startswith(module) and each.endswith(f".{name}") for each in deepest), name
