"""What a person or a program reads of runs and data: text, pages, charts."""
