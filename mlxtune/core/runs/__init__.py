"""A run's folder as it is read later: records, summaries, verification, certificates."""
