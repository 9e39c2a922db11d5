"""Shows runs, plans and data to people: as text, on pages and in notebooks."""
