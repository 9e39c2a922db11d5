"""Trackers, which record runs in addition to their folders, for comparison."""
