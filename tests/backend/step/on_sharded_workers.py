"""Script for test_workers.py: check that workers sharing a model compute a single worker's steps.

python -m tests.backend.step.on_sharded_workers [ARCHITECTURE ...]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.workers.shards import ARCHITECTURES
from mlxtune.backend.workers.workers import Workers
from mlxtune.core.data.encode import Example
from tests.backend.step.executions import WAYS, assert_same, computed, fixed_step, fresh
from tests.long.architectures import ARCHITECTURES as TINY
from tests.models import write_model

# Sizes that shard into whole groups of quantised weights.
SIZES = {
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# Execution, bits of quantisation, and options.
CASES: list[tuple[str, int | None, dict[str, Any]]] = [
    ("split head", None, {"targets": ATTENTION}),
    ("packed", None, {"targets": (*ATTENTION[:3], "up_proj", "down_proj"), "dropout": 0.3}),
    ("packed with recompute", 4, {"targets": ("q_proj", "o_proj")}),
]
# MLX's quantised products compute the head's logits.
PACKED_HEAD = ("packed", 4, {"targets": ATTENTION, "quantized_compute": "quantized"})


def check(workers: Workers, how: str, folder: Path, step: Sequence[Example], **config: Any) -> None:
    """Compare loss, gradients, an update and an evaluation with a single worker's."""
    together, alone = (
        fresh(folder, WAYS[how], 64, workers=each, **config) for each in (workers, Workers())
    )
    assert_same(computed(together, list(step)), computed(alone, list(step)))
    results = [each.train_batch(step, step=1) for each in (together, alone)]
    assert results[0].run_tokens == results[1].run_tokens > 0
    np.testing.assert_allclose(results[0].grad_norm or 0, results[1].grad_norm or 0, rtol=1e-4)
    losses = [each.evaluate(step).avg_loss for each in (together, alone)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    together.snapshot()


def check_all(names: Sequence[str], *, few: bool = False) -> None:
    """Check architectures in all cases, or in fewer with `few`."""
    workers = Workers.launched(tensor=True)
    assert workers.world_size > 1
    cases = CASES[1:] if few else CASES
    for name in names:
        packed = [PACKED_HEAD] if name == names[0] and not few else []
        for how, quantize, config in [*cases, *packed]:
            has_experts = "moe" in name or name in ("gpt_oss", "minimax")
            if has_experts and "dropout" in config:
                continue
            with tempfile.TemporaryDirectory() as folder:
                model = Path(folder) / name
                options = TINY.get(name, {})
                if "text_config" in options:
                    options = {"text_config": {**options["text_config"], **SIZES}}
                else:
                    options = {**options, **SIZES}
                write_model(model, name, quantize=quantize, **options)
                check(workers, how, model, fixed_step(), **config)
            print(f"worker {workers.rank}: {name}, {how}, {quantize}", flush=True)
    print(f"worker {workers.rank}: done", flush=True)


def main() -> None:
    """Check the named architectures, or all of them."""
    check_all(sys.argv[1:] or list(ARCHITECTURES))


if __name__ == "__main__":
    main()
