"""Model folders, loading, quantising, and layers for training."""
