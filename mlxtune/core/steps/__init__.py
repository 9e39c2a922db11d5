"""How steps are planned: the order of rows, padded groups, packed sequences, memory and workers."""
