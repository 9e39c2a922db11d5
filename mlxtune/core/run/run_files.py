"""Every file that a run writes, and what it contains.

Paths are relative to the folder of --output, with the default --checkpoint-dir.
"""

# The folders of checkpoints; N is an epoch or a step.
_CHECKPOINT = "checkpoints/{best,epoch-N,step-N}"
RUN_FILES: dict[str, str] = {
    "checkpoints/.mlxtune": "marks the folder as a run's, whose files the next run may move",
    "checkpoints/run.json": "the run's options, model, plan and data",
    "adapters.safetensors": "the adapter in mlx-lm's format: of the step with the lowest "
    "validation loss, "
    "or of the last step without validation; --output sets its name",
    "adapter_config.json": "what mlx-lm needs to load the adapter: rank, scale, dropout and layers",
    "checkpoints/metrics.jsonl": "a JSON line for every step, skipped step, validation and epoch "
    "so far",
    "checkpoints/ledger.json": "where every row and every token of each data file went",
    "checkpoints/result.json": "the result of a finished run: steps, losses, the adapter's SHA-256",
    "checkpoints/evaluation.json": "how much the adapter helped on the validation rows, if there "
    "are any",
    "checkpoints/report.html": "a page about the run; mlxtune report rewrites it",
    "checkpoints/profile.jsonl": "how long each phase of a step took; with --profile-interval",
    "checkpoints/tracking.json": "the run's ids in its trackers; with --track",
    "checkpoints/{tensorboard,wandb}/…": "files of the trackers; with --track",
    f"{_CHECKPOINT}/adapters.safetensors": "the adapter at that step",
    f"{_CHECKPOINT}/adapter_config.json": "the same as next to --output",
    f"{_CHECKPOINT}/optimizer.safetensors": "AdamW's moments and step, for --resume",
    f"{_CHECKPOINT}/parameters.safetensors": "the trained parameters, for --resume, if the adapter "
    "stores an equivalent LoRA: with --init pissa, or with several workers",
    f"{_CHECKPOINT}/metrics.jsonl": "the records up to that step",
    f"{_CHECKPOINT}/metadata.json": "every option, seeds, versions, hashes of the data and base "
    "model",
    f"{_CHECKPOINT}/manifest.json": "size and SHA-256 of each file of the checkpoint, written last",
    "checkpoints/previous/…": "the files of the run that this one replaced",
}
