"""Conversions of adapters to and from the formats of other tools, one format in each file."""
