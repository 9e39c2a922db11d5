"""Files: written whole, owned, hashed, locked; and limited child processes."""
