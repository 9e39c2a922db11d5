"""The trainer, what it records, and what it saves."""
