"""The loss of a preference step on a device, whole or split into micro-batches."""
