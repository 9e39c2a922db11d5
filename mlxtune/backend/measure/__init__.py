"""Measures steps, ours and a peer's: time and proofs."""
