"""Every file that a run writes, and what it contains.

Paths are relative to the folder of --output, with the default --checkpoint-dir.
"""

from __future__ import annotations

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
# The folders of checkpoints; N is an epoch or a step.
_CHECKPOINT = f"{_RUN}/{{{BEST},epoch-N,step-N}}"
RUN_FILES: dict[str, str] = {
    f"{_RUN}/{ABOUT}": "the run's options, model, plan and data",
    ADAPTER: "the adapter in mlx-lm's format: of the best epoch by validation loss, or of the last "
    "step without validation; --output sets its name",
    ADAPTER_CONFIG: "what mlx-lm needs to load the adapter: rank, scale, dropout and layers",
    f"{_RUN}/{METRICS}": "a JSON line for every step, skipped step, validation and epoch so far",
    f"{_RUN}/{LEDGER}": "where every row and every token of each data file went",
    f"{_RUN}/{RESULT}": "the result of a finished run: steps, losses, the adapter's SHA-256",
    f"{_RUN}/{EVALUATION}": "how much the adapter helped on the validation rows, if there are any",
    f"{_RUN}/{REPORT}": "a page about the run; mlxtune report rewrites it",
    f"{_RUN}/{PROFILE}": "how long each phase of a step took; with --profile-interval",
    f"{_RUN}/{TRACKING}": "the run's ids in its trackers; with --track",
    f"{_RUN}/{{{TENSORBOARD},wandb}}/…": "files of the trackers; with --track",
    f"{_CHECKPOINT}/{ADAPTER}": "the adapter at that step",
    f"{_CHECKPOINT}/{ADAPTER_CONFIG}": "the same as next to --output",
    f"{_CHECKPOINT}/optimizer.safetensors": "AdamW's moments and step, for --resume",
    f"{_CHECKPOINT}/parameters.safetensors": "the trained parameters, for --resume, if the adapter "
    "stores an equivalent LoRA: with --init pissa, or with several ranks",
    f"{_CHECKPOINT}/{METRICS}": "the records up to that step",
    f"{_CHECKPOINT}/{LEDGER}": "the same as above",
    f"{_CHECKPOINT}/{METADATA}": "every option, seeds, versions, hashes of the data and base model",
    f"{_CHECKPOINT}/{MANIFEST}": "size and SHA-256 of each file of the checkpoint, written last",
    f"{_RUN}/{PREVIOUS}/…": "the files of the run that this one replaced",
}
