"""Data files to rows, conversations, rendered text and examples."""
