"""The trainer, its records, and its checkpoints."""
