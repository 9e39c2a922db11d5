"""Predicts how much memory training takes."""
