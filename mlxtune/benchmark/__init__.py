"""The `bench` command, which times training against a peer: its processes, result and view."""
