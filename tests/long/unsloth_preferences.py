"""Time whole runs of Unsloth's MLX preference trainer; see `bench_preferences`.

Runs in Unsloth's environment: `python -m tests.long.unsloth_preferences JOB`. JOB is a JSON file
with the keys `model`, `rows` (prompt, chosen and rejected as lists of messages), `batch_size`,
`steps`, `rank`, `targets`, `max_length`, `rate`, `beta`, the folder `output`, and `first`: whether
the reference runs before the steps. Prints one line of JSON.
"""

# This import loads the fast BLAS and sets the allocator, as in mlxtune's own runs.
import mlxtune.backend  # noqa: F401, I001

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train a job; return the seconds from the loaded model to the last step, and memory peaks."""
    os.environ |= {"UNSLOTH_IS_PRESENT": "1", "UNSLOTH_ZOO_DISABLE_GPU_INIT": "1"}
    from unsloth_zoo.mlx.loader import FastMLXModel
    from unsloth_zoo.mlx.trainer import MLXDPOConfig, MLXDPOTrainer

    model, tokenizer = FastMLXModel.from_pretrained(
        job["model"], dtype="float32", load_in_4bit=False, max_seq_length=job["max_length"]
    )
    model = FastMLXModel.get_peft_model(
        model,
        r=job["rank"],
        lora_alpha=2 * job["rank"],
        lora_dropout=0,
        target_modules=job["targets"],
        use_gradient_checkpointing=False,
    )
    mx.eval(model.parameters())
    mx.reset_peak_memory()
    started = time.perf_counter()
    config = MLXDPOConfig(
        per_device_train_batch_size=job["batch_size"],
        gradient_accumulation_steps=1,
        max_steps=job["steps"],
        warmup_steps=0,
        learning_rate=job["rate"],
        lr_scheduler_type="constant",
        optim="adamw",
        max_grad_norm=0.0,
        max_grad_leaf_norm=0.0,
        logging_steps=1,
        output_dir=job["output"],
        max_seq_length=job["max_length"],
        max_length=job["max_length"],
        max_prompt_length=None,
        compile=False,
        gradient_checkpointing=False,
        dataset_order="sequential",
        disable_memory_limits=True,
        beta=job["beta"],
        precompute_ref_log_probs=job["first"],
    )
    losses: list[float] = []
    trainer = MLXDPOTrainer(model, tokenizer, job["rows"], args=config)
    trainer.add_step_callback(lambda step, total, loss, *_: losses.append(float(loss)))
    trainer.train()
    mx.synchronize()
    return {
        "seconds": time.perf_counter() - started,
        "peak": mx.get_peak_memory(),
        "losses": losses,
    }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
