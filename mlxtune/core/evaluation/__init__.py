"""Tells whether an adapter helped: losses and preferences of rows, intervals, verdicts."""
