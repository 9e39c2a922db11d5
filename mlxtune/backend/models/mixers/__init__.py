"""Attention, convolutions, recurrences and experts for training."""
