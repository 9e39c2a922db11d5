"""The device: its limits, faults and memory."""
