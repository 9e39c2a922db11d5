"""Measures steps, ours and a peer's: counts, products, phases and proofs."""
