"""Objectives: functions of log-probabilities that a step minimises. Pure Python and numpy."""
