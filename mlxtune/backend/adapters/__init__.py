"""Reads, writes, attaches and fuses adapters, and compares exports with the trained model."""
