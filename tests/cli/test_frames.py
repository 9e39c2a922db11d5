"""The way from the command to the loss is short enough to read."""

from __future__ import annotations

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: split
import sys
from pathlib import Path
from types import FunctionType

import mlx.core as mx
import pytest

from mlxtune.backend.forward import linear_head
from mlxtune.cli import COMMANDS
from tests.models import sums, write_chat, write_model

# From `train` of the command line to the function that calls mx.fast.cross_entropy.
MOST = 14


def test_loss_is_few_frames_from_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts Python frames of mlxtune's files; click's and MLX's own are not counted."""
    train = next(each for each in COMMANDS if each.name == "train")
    assert isinstance(train.callback, FunctionType)
    start = train.callback.__code__
    stacks: list[list[str]] = []

    def loss_sum(*arrays: mx.array, **options: mx.array) -> mx.array:
        frame, names = sys._getframe(1), []
        while frame.f_code is not start:
            module = frame.f_globals["__name__"]
            if module.startswith("mlxtune."):
                names.append(f"{module}.{frame.f_code.co_qualname}")
            assert frame.f_back is not None
            frame = frame.f_back
        stacks.append([*names, "mlxtune.cli.commands._train"][::-1])
        return whole(*arrays, **options)

    whole = linear_head.head_loss_sum
    monkeypatch.setattr(linear_head, "head_loss_sum", loss_sum)
    folder = write_model(tmp_path / "model", "qwen3")
    chat = write_chat(tmp_path / "chat.jsonl", sums(8))
    output = tmp_path / "out" / "adapters.safetensors"
    arguments = ["--model-path", folder, "--data", chat, "--output", output, "--max-steps", 1]
    arguments += ["--val-split", 0, "--samples", 0, "--quiet"]
    train.main([str(argument) for argument in arguments], standalone_mode=False)

    assert stacks
    deepest = max(stacks, key=len)
    assert len(deepest) <= MOST, "\n".join(deepest)
