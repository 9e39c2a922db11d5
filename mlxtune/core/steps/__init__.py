"""How steps are divided: row order, padded and packed micro-batches, memory, workers."""
