"""The trainer and everything it stands on, in pure Python: no mlx, no transformers."""
