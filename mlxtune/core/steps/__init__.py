"""How steps are planned: order of rows, padded groups, packed lines, memory and workers."""
