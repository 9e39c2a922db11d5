"""Adapter files: read, written, attached, fused, and compared with the trained model."""
