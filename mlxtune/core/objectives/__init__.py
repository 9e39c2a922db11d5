"""Objectives: what a step minimises, as functions of log-probabilities. Pure Python and numpy."""
