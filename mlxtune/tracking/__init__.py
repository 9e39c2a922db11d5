"""Trackers: services and files that record runs for comparison, besides a run's own folder."""
