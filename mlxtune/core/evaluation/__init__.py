"""Whether an adapter helped: losses and preferences of rows, intervals and verdicts."""
