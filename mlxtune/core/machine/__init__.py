"""The machine: reservations, facts and diagnosis."""
