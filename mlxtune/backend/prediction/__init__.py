"""Predicts the memory of a step before any weight is read."""
