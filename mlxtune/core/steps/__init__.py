"""How steps are planned: the order of rows, padded groups, packed lines, memory and workers."""
