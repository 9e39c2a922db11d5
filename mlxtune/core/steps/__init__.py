"""How steps are planned: row order, padded and packed micro-batches, memory, workers."""
