"""Measures steps, ours and a peer's: time, phases and proofs."""
