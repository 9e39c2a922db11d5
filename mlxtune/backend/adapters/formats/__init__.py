"""Adapters in the formats of other tools, one in each file, and back."""
