"""What a machine can do: facts, checks and proofs, their worker process and their view."""
