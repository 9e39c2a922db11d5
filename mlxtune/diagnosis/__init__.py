"""The abilities of a machine: facts, checks and proofs, their worker process and their view."""
