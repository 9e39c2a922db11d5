"""Data files: their rows, the formats of rows, and what is wrong with a row."""
