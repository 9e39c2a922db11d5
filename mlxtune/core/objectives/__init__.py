"""Objectives, which steps minimise: functions of log-probabilities in pure Python and numpy."""
