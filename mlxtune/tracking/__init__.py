"""Trackers: where runs are recorded in addition to their folders, for comparison."""
