"""The machine: its facts and conditions, checks of them, GPU faults and reservations."""
