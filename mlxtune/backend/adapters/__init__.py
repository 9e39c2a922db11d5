"""Adapter files: attached, fused, saved, and proved."""
