"""The live page of runs: its server, its view, and the model that answers on it."""
