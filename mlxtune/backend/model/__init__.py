"""Model folders, weights, quantisation, and memory limits."""
