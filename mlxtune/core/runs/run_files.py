"""Every file that a run leaves behind, and what it holds: for the reference, and for its test.

Paths are relative to the folder of --output, with the default --checkpoint-dir.
"""

from __future__ import annotations

import re

from mlxtune.core.training.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    BEST,
    MANIFEST,
    METADATA,
    METRICS,
)
from mlxtune.core.training.profile import PROFILE
from mlxtune.core.training.run_folder import (
    ABOUT,
    EVALUATION,
    LEDGER,
    PREVIOUS,
    REPORT,
    RESULT,
    TENSORBOARD,
    TRACKING,
)

_RUN = "checkpoints"
# A checkpoint is one of these folders; N is an epoch or a step.
_CHECKPOINT = f"{_RUN}/{{{BEST},epoch-N,step-N}}"
RUN_FILES: dict[str, str] = {
    f"{_RUN}/{ABOUT}": "what the run is: its options, model, plan and data",
    ADAPTER: "the adapter, as mlx-lm loads it: of the best epoch by validation loss, or of the "
    "last step without validation; its name is that of --output",
    ADAPTER_CONFIG: "what mlx-lm asks of an adapter: its rank, scale, dropout and layers",
    f"{_RUN}/{METRICS}": "a JSON line for every step, skipped step, validation and epoch so far",
    f"{_RUN}/{LEDGER}": "where every row and every token of each data file went",
    f"{_RUN}/{RESULT}": "how the run ended, once it has: steps, losses, the adapter's SHA-256",
    f"{_RUN}/{EVALUATION}": "what the adapter gained on the validation rows, where there are some",
    f"{_RUN}/{REPORT}": "a page of all that, which mlxtune report writes again",
    f"{_RUN}/{PROFILE}": "where the time of steps went; with --profile-interval",
    f"{_RUN}/{TRACKING}": "what trackers know the run by; with --track",
    f"{_RUN}/{{{TENSORBOARD},wandb}}/…": "files of trackers; with --track",
    f"{_CHECKPOINT}/{ADAPTER}": "the adapter at that moment",
    f"{_CHECKPOINT}/{ADAPTER_CONFIG}": "the same as beside --output",
    f"{_CHECKPOINT}/optimizer.safetensors": "AdamW's moments and step, for --resume",
    f"{_CHECKPOINT}/parameters.safetensors": "what is trained, for --resume, where the adapter is "
    "LoRA that computes the same: with --init pissa, or ranks that differ",
    f"{_CHECKPOINT}/{METRICS}": "the records up to that moment",
    f"{_CHECKPOINT}/{LEDGER}": "the same as above",
    f"{_CHECKPOINT}/{METADATA}": "every option, seeds, versions, hashes of the data and base model",
    f"{_CHECKPOINT}/{MANIFEST}": "size and SHA-256 of each file of the checkpoint, written last",
    f"{_RUN}/{PREVIOUS}/…": "the same of the run before, once a new one began in its place",
}

# Those that not every run leaves.
ON_REQUEST = {entry for entry, holds in RUN_FILES.items() if "with --" in holds}


def described(path: str) -> str | None:
    """Return the entry of RUN_FILES that a file of a run belongs to; None for one of none."""
    for entry in RUN_FILES:
        if re.fullmatch(_pattern(entry), path):
            return entry
    return None


def _pattern(entry: str) -> str:
    pattern = re.escape(entry).replace("…", ".*")
    alternatives = re.sub(r"\\\{(.*?)\\\}", lambda m: f"({m[1].replace(',', '|')})", pattern)
    return alternatives.replace(r"\-N", r"\-\d+")
