"""The machine: files written whole, locks, reservations, facts and diagnosis."""
