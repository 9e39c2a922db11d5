"""How steps are planned: row order, padded micro-batches, packed sequences, memory, workers."""
