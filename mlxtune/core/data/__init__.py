"""Turns data files into rows, conversations, rendered text and examples."""
