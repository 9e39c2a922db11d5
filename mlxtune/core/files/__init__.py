"""Writes, checks, hashes and locks files, and runs limited helper processes."""
