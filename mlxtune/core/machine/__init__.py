"""The machine: its facts and their checks, its conditions, GPU faults and reservations."""
