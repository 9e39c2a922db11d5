"""Pages, charts and cards of a run."""
