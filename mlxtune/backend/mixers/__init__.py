"""Convolutions, recurrences and experts for training, in the place of mlx-lm's, on any device."""
