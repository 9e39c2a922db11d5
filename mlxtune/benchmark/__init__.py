"""The `bench` command, which times training against a peer, with its worker, result and view."""
