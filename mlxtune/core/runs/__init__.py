"""Reading a run's folder: records, summaries, verification, certificates."""
