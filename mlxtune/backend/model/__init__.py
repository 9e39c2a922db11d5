"""Model folders, weights, quantisation and the memory they may take."""
