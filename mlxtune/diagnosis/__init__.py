"""Diagnosis of a machine: facts, checks and proofs, with their helper process and view."""
