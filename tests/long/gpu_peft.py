"""Take the steps of `gpu`'s cases with transformers and PEFT, and print each result as JSON.

    python -m tests.long.gpu_peft CASES.json

What a trainer without padding-free kernels runs: bfloat16, PyTorch's scaled dot-product attention,
one padded batch a step, the loss from full logits, and PyTorch's AdamW. `gpu` writes the file: for
each case its model folder, its steps as rows of tokens and masks, and the options of LoRA and the
optimizer. The lines are those of `gpu_steps`. Does not import mlxtune or MLX.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

Batch = dict[str, torch.Tensor]


def padded(rows: Sequence[Mapping[str, Sequence[int]]]) -> Batch:
    """Return rows as one padded batch, whose labels are the supervised tokens.

    tokens    5  6  7  8        ids     5  6  7  8     labels  -100 -100 7  8
              5  9                      5  9  0  0             -100 9 -100 -100
    """
    width = max(len(row["tokens"]) for row in rows)
    ids, present = torch.zeros(2, len(rows), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for line, row in enumerate(rows):
        tokens, mask = torch.tensor(row["tokens"]), torch.tensor(row["mask"]).bool()
        ids[line, : len(tokens)], present[line, : len(tokens)] = tokens, 1
        labels[line, : len(tokens)][mask] = tokens[mask]
    batch = {"input_ids": ids, "attention_mask": present, "labels": labels}
    return {name: value.to(DEVICE) for name, value in batch.items()}


def trainer(case: Mapping[str, Any]) -> Callable[[Batch], torch.Tensor]:
    """Return a function that takes a step on a batch, and returns its loss."""
    with torch.device(DEVICE):
        base = AutoModelForCausalLM.from_pretrained(
            case["folder"], dtype=DTYPE, attn_implementation="sdpa"
        )
    model = get_peft_model(base, LoraConfig(**case["lora"], task_type="CAUSAL_LM")).train()
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, **case["optimizer"], fused=DEVICE == "cuda")

    def step(batch: Batch) -> torch.Tensor:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(case: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """Return the seconds of each pass and the peak; the losses are those of the warm-up."""
    report("reading the weights")
    step = trainer(case)
    batches = [padded(rows) for rows in case["steps"]]
    report("the warm-up")
    started = time.perf_counter()
    losses = [float(step(batch)) for batch in batches]
    found: dict[str, Any] = {"warm_up_s": time.perf_counter() - started, "losses": losses}
    report("the timed steps")
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found["seconds"] = []
    for _ in range(case["passes"]):
        started = time.perf_counter()
        for batch in batches:
            float(step(batch))  # as a trainer that logs every step
        found["seconds"].append(time.perf_counter() - started)
    found["peak_memory"] = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
    return found


def main() -> None:
    """Measure the cases in the file that the command line names; an error ends only its case."""
    for case in json.loads(Path(sys.argv[1]).read_bytes()):

        def say(name: str = case["name"], **entry: Any) -> None:
            print(json.dumps({"case": name} | entry), flush=True)

        try:
            say(found=measure(case, lambda phase: say(phase=phase)))
        # Any error: the other cases still run.
        except Exception as error:  # noqa: BLE001
            say(failed=f"{type(error).__name__}: {error}"[:500])
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
