"""A real model on real data, from the options to mlx-lm with the adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import mlx.core as mx
import pytest
from mlx_lm.utils import load

from mlxtune import TrainConfig, TrainResult, train
from mlxtune.core.data.held_out import hold_out_rows

STEPS, VAL_ROWS = 5, 4
FLAGS = (
    f"--lr 1e-2 --targets all --max-steps {STEPS} --val-rows {VAL_ROWS} --samples 0 --quiet "
    "--template gemma"
).split()


def rows_of(shared: Path) -> list[str]:
    """Return the first rows of the data, enough for the steps of the run."""
    text = (shared / "chat" / "wikisql_train.jsonl").read_text(encoding="utf-8")
    return text.splitlines()[:60]


def config(shared: Path, folder: Path) -> TrainConfig:
    data = folder.parent / "wikisql.jsonl"
    data.write_text("".join(line + "\n" for line in rows_of(shared)), encoding="utf-8")
    return TrainConfig(
        model_path=str(shared / "models" / "stories260k"),
        data=str(data),
        output=str(folder / "adapters.safetensors"),
        template="gemma",
        lr=1e-2,
        targets=("all",),
        max_steps=STEPS,
        val_rows=VAL_ROWS,
        samples=0,
        quiet=True,
    )


@pytest.fixture(scope="module")
def first_run(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    folder = tmp_path_factory.mktemp("run")
    return folder, train(config(shared, folder))


@pytest.mark.slow
def test_validation_loss_falls_by_more_than_a_third(first_run: tuple[Path, TrainResult]) -> None:
    training = first_run[1].training
    assert training is not None
    assert training.best_val_loss < training.initial_val_loss * 2 / 3


@pytest.mark.long
def test_same_run_in_another_process_writes_the_same_bytes(
    first_run: tuple[Path, TrainResult], shared: Path, tmp_path: Path
) -> None:
    options = config(shared, tmp_path)
    paths = [f"--model-path={options.model_path}", f"--output={options.output}"]
    paths += [f"--data={data}" for data in options.data]
    command = [sys.executable, "-m", "mlxtune", "train", *paths, *FLAGS]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    for name in ("adapters.safetensors", "checkpoints/best/adapters.safetensors"):
        assert (tmp_path / name).read_bytes() == (first_run[0] / name).read_bytes()


@pytest.mark.slow
def test_mlx_lm_computes_the_losses_that_were_reported(
    first_run: tuple[Path, TrainResult], shared: Path
) -> None:
    """Encode and evaluate the held-out rows here by hand, on the model that mlx-lm loads."""
    folder, result = first_run
    model, tokenizer = load(str(shared / "models" / "stories260k"), adapter_path=str(folder))
    held_out = held_out_rows(shared)
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
    lines = rows_of(shared)
    # Equal rows are all trained on or all held out.
    identities = [lines.index(line) for line in lines]
    _, held_out = hold_out_rows(identities, 0.2, 42, VAL_ROWS)
    return [json.loads(lines[i])["messages"] for i in held_out]
