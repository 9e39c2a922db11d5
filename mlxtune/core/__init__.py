"""The trainer and its foundations, in pure Python: no mlx, no transformers."""
