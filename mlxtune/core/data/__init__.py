"""From data files to rows, conversations, rendered text and examples."""
