"""A run's folder: its files, records, checkpoints, summary and verification."""
