"""The live page of runs: its server, its view, and the model that answers questions on the page."""
