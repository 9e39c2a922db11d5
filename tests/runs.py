"""Writes folders of runs in `train`'s format, without training."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

from mlxtune.config import TrainConfig
from mlxtune.core.files.reading import file_hash
from mlxtune.core.files.writing import write_json

LEDGER = {
    "path": "data/chat.jsonl",
    "rows_read": 50,
    "rows_train": 40,
    "rows_validation": 8,
    "rows_skipped": {"no assistant turn": 2},
    "rows_truncated": 1,
    "examples": 48,
    "tokens": 5000,
    "tokens_supervised": 2000,
    "tokens_context": 2900,
    "tokens_truncated": 100,
    "notes": {},
}
LENGTHS = {
    "examples": 48,
    "tokens": {"p50": 90, "p95": 190, "max": 240, "mean": 104.2, "total": 5000},
    "supervised": {"p50": 40, "p95": 70, "max": 80, "mean": 41.7, "total": 2000},
}
PLAN = {
    "rows_train": 40,
    "rows_validation": 8,
    "micro_batch_tokens": 384,
    "micro_batches_per_step": 1.5,
    "padding_share": 0.05,
    "run_share": 1.05,
    "grad_checkpoint": False,
    "loss_chunk": 256,
    "memory": {"limit": 24 * 10**9, "peak": 26 * 10**6, "weights": 4 * 10**6}
    | {"optimizer": 2 * 10**6, "activations": 12 * 10**6, "head": 8 * 10**6},
}
EVALUATION = {
    "rows": 8,
    "tokens": 320,
    "base": {"loss": 4.0, "perplexity": 54.6},
    "adapted": {"loss": 1.0, "perplexity": 2.718},
    "difference": {"loss": -3.0, "share": -0.75, "low": -3.2, "high": -2.75, "confidence": 0.95}
    | {"resamples": 1000, "seed": 42},
    "verdict": "helped",
    "hardly": False,
    "start": None,
    "base_difference": None,
    "left_out": 0,
    "only_trained": False,
    "preference": None,
    "preferred": None,
    "gained": [
        {"path": "chat.jsonl", "row": 7, "tokens": 30, "base_loss": 5.0, "adapted_loss": 0.5}
    ],
    "lost": [
        {"path": "chat.jsonl", "row": 9, "tokens": 30, "base_loss": 2.0, "adapted_loss": 2.25}
    ],
    "generated": {
        "rows": 2,
        "exact_match": {"base": 0, "adapted": 1},
        "samples": [
            {"path": "chat.jsonl", "row": 7, "prompt": "2 + 2?", "expected": "4"}
            | {"base": "the the", "adapted": "4"},
            {"path": "chat.jsonl", "row": 9, "prompt": "3 + 3?\nthink", "expected": "6"}
            | {"base": "of", "adapted": "7"},
        ],
    },
}


def config(**changes: Any) -> dict[str, Any]:
    from dataclasses import asdict

    values = {"model_path": "models/tiny", "data": ("data/chat.jsonl",), **changes}
    return asdict(TrainConfig(**values))


def step_line(step: int, per_epoch: int, **changes: Any) -> dict[str, Any]:
    """Return a step's record; the loss falls with the steps, with a small oscillation."""
    loss = 4 * math.exp(-step / 40) + 0.3 + 0.1 * math.sin(step * 1.7)
    return {
        "kind": "step",
        "step": step,
        "epoch": (step - 1) // per_epoch + 1,
        "loss": loss,
        "learning_rate": 1e-4 * min(1, step / 5),
        "grad_norm": 1 / step,
        "perplexity": math.exp(loss),
        "tokens": 400,
        "supervised_tokens": 160,
        "rows": 4,
        "seconds": 0.2,
        "memory": 20 * 10**6 + 1000 * (step % 7),
        "micro_batches": 2,
        "run_tokens": 420,
        "padding": 21,
        **changes,
    }


def metrics(epochs: int, per_epoch: int, validation: bool = True) -> list[dict[str, Any]]:
    """Return the records of some epochs; validation losses are 4 at first, then 2 / epoch."""
    lines: list[dict[str, Any]] = []
    if validation:
        lines.append({"kind": "validation", "step": 0, "val_loss": 4.0, "val_perplexity": 54.6})
    for epoch in range(1, epochs + 1):
        last = epoch * per_epoch
        lines += [step_line(step, per_epoch) for step in range(last - per_epoch + 1, last + 1)]
        val = 2 / epoch
        if validation:
            lines.append({"kind": "validation", "step": last, "val_loss": val, "val_perplexity": 2})
        lines.append(
            {"kind": "epoch", "epoch": epoch, "train_loss": 3 / epoch, "train_perplexity": 2.0}
            | {"val_loss": val if validation else None, "val_perplexity": 2.0}
            | {"learning_rate": 1e-4, "epoch_time_ms": 8000, "samples_per_sec": 20.0}
        )
    return lines


def as_lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_run(
    folder: Path,
    *,
    epochs: int = 2,
    per_epoch: int = 40,
    validation: bool = True,
    finished: bool = True,
    about: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Path:
    """Write an adapter and its run to a folder; return the folder of the checkpoints."""
    run = folder / "checkpoints"
    run.mkdir(parents=True)
    (folder / "adapters.safetensors").write_bytes(b"weights")
    own = config(epochs=epochs, **(options or {}))
    said = {
        "format": 1,
        "started_at": "2026-03-04T05:06:07+00:00",
        "device": "a machine (cpu)",
        "model": {"path": "models/tiny", "type": "llama", "description": "llama, 2 layers"},
        "lora": {"description": "rank 8 on 4 modules"},
        "template": "the model's own",
        "plan": PLAN | {"steps": epochs * per_epoch, "steps_per_epoch": per_epoch},
        "lengths": LENGTHS,
        "data_hash": "sha256:da7a",
        "validation_hash": "sha256:da7a" if validation else "",
        "versions": {"mlxtune": "0.1.0", "mlx": "0.32.4"},
        "config": own,
    }
    write_json(run / "run.json", said | (about or {}))
    write_json(run / "ledger.json", [LEDGER])
    done = epochs if finished else epochs - 1
    records = metrics(done, per_epoch, validation)
    if not finished:
        first = done * per_epoch + 1
        records += [step_line(step, per_epoch) for step in range(first, first + per_epoch // 2)]
    (run / "metrics.jsonl").write_bytes(as_lines(records))
    write_checkpoint(run, own, epochs * per_epoch)
    if evaluation is not None:
        write_json(run / "evaluation.json", evaluation)
    if finished:
        write_json(
            run / "result.json",
            {
                "steps": epochs * per_epoch,
                "epochs": epochs,
                "stopped_early": False,
                "train_loss": 3 / epochs,
                "initial_val_loss": 4.0 if validation else None,
                "best_epoch": epochs if validation else None,
                "best_val_loss": 2 / epochs if validation else None,
                "total_time_ms": 16_000,
                "peak_memory": 27 * 10**6,
                "adapter": "../adapters.safetensors",
                "sha256": file_hash(folder / "adapters.safetensors"),
            },
        )
    return run


def write_rewarded_run(
    folder: Path, steps: int = 12, *, text: str = "", options: dict[str, Any] | None = None
) -> Path:
    """Write a run whose answers get shorter, which `short` rewards and `json` does not.

    The record of samples has two rows a step, with two answers each; `text` replaces their texts.
    After step 8, no answer has a reward of `json`.
    """
    given = {"objective": "grpo", "reward": ("json", "short.py:short=2"), "kl": 0.1}
    run = write_run(folder, options={**given, **(options or {})})
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        json_mean, short = 1 - step / 20, step / 20
        values = {"rewards/json/mean": json_mean, "rewards/json/std": 0.25}
        values |= {"rewards/short.short/mean": short, "rewards/short.short/std": 0.5}
        values |= {"reward": json_mean + 2 * short, "reward_std": 0.75, "kl": step / 100}
        values |= {"completions/mean_length": 40.0 - step, "completions/clipped_ratio": 0.25}
        values |= {"frac_reward_zero_std": 0.5, "completions/without_reward": 0.0}
        values |= {"ratio/mean": 1.0, "ratio/max": 1.01}
        records.append(step_line(step, 40, metrics=values))
    (run / "metrics.jsonl").write_bytes(as_lines(records))
    members = []
    for step in range(1, steps + 1):
        groups = []
        for row in (1, 2):
            samples = [
                {"tokens": [5] * length, "logps": [-1.0] * length, "finished": bool(i)}
                | {"text": text or f"{kind} answer {row} of step {step}"}
                | {"rewards": {"json": float(step < 9 and not i), "short.short": i * row / 2}}
                | {"reward": float(step < 9 and not i) + i * row, "advantage": i - 0.5}
                for i, (kind, length) in enumerate((("long", 40 - step), ("brief", 3)))
            ]
            groups.append(
                {"step": step, "row": f"data/prompts.jsonl:{row}", "use": 0, "seed": 42}
                | {"adapter": "sha256:ada9", "prompt": text or f"Prompt {row}"}
                | {"prompt_tokens": [1, 2], "samples": samples}
            )
        members.append(gzip.compress(as_lines(groups), mtime=0))
    (run / "samples.jsonl.gz").write_bytes(b"".join(members))
    return run


def write_checkpoint(run: Path, own: dict[str, Any], total_steps: int) -> None:
    """Write the parts of a checkpoint that a report reads."""
    folder = run / "epoch-1"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(b"")
    write_json(folder / "manifest.json", {"format": 1, "files": {}})
    write_json(
        folder / "metadata.json",
        {"step": 40, "total_steps": total_steps, "total_time_ms": 8000, "base_hash": "sha256:ba5e"}
        | {"data_hash": "sha256:da7a", "validation_hash": "sha256:da7a", "config": own}
        | {"versions": {"mlxtune": "0.0.9"}},
    )
