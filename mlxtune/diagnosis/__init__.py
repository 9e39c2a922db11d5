"""Diagnosis of a machine: facts, checks and proofs, with their worker process and view."""
