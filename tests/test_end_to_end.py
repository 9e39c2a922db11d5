"""A real model on real data, from the options to the adapter in mlx-lm's hands."""

from __future__ import annotations

import mlxtune.backend  # noqa: F401, I001
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load

from mlxtune import TrainConfig, train

OPTIONS: dict[str, Any] = {"lr": 1e-2, "targets": "all", "max_steps": 24, "val_rows": 40}


def run(shared: Path, folder: Path, **options: Any) -> Any:
    return train(
        TrainConfig(
            model_path=shared / "models" / "stories260k",
            data=shared / "chat" / "wikisql_train.jsonl",
            output=folder / "adapters.safetensors",
            quiet=True,
            **OPTIONS | options,
        )
    )


@pytest.fixture(scope="module")
def shared_module() -> Path:
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("needs the real material in ../shared, which is not part of the project")
    return folder


@pytest.fixture(scope="module")
def first_run(shared_module: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run(shared_module, folder)


def test_validation_loss_falls_by_more_than_a_third(first_run: tuple[Path, Any]) -> None:
    training = first_run[1].training
    assert training.best_val_loss < training.initial_val_loss * 2 / 3


def test_same_command_twice_writes_the_same_bytes(
    first_run: tuple[Path, Any], shared_module: Path, tmp_path: Path
) -> None:
    run(shared_module, tmp_path)
    for name in ("adapters.safetensors", "checkpoints/best/adapters.safetensors"):
        assert (tmp_path / name).read_bytes() == (first_run[0] / name).read_bytes()


def test_mlx_lm_computes_the_losses_that_were_reported(
    first_run: tuple[Path, Any], shared_module: Path
) -> None:
    """The held-out rows, encoded and evaluated here by hand on the model that mlx-lm loads."""
    folder, result = first_run
    model, tokenizer = load(str(shared_module / "models" / "stories260k"), adapter_path=str(folder))
    held_out = held_out_rows(shared_module)
    total, count = 0.0, 0
    for messages in held_out:
        tokens, mask = [1], [0]  # BOS
        text, spans = "", []
        for message in messages:
            role = "model" if message["role"] == "assistant" else "user"
            text += f"<start_of_turn>{role}\n"
            if role == "model":
                spans.append((len(text), len(text) + len(message["content"] + "<end_of_turn>")))
            text += message["content"] + "<end_of_turn>\n"
        encoded = tokenizer._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            tokens.append(token)
            mask.append(int(any(a <= start and end <= b for a, b in spans)))
        tokens, mask = tokens[:512], mask[:512]
        logits = model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
        losses = mx.logsumexp(logits, -1) - logits[mx.arange(len(tokens) - 1), mx.array(tokens[1:])]
        total += (losses * mx.array(mask[1:])).sum().item()
        count += sum(mask[1:])
    assert total / count == pytest.approx(result.training.best_val_loss, rel=1e-4)


def held_out_rows(shared: Path) -> list[Any]:
    from mlxtune.core.batch import split_rows

    lines = (shared / "chat" / "wikisql_train.jsonl").read_text().splitlines()
    rows: list[Any] = [json.loads(line)["messages"] for line in lines]
    return split_rows(rows, 0.2, 42, OPTIONS["val_rows"])[1]
