"""Pages of runs and inspections, with charts, and the card of a run in a notebook."""
