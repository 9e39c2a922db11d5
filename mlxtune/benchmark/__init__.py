"""The processes, result and view of the `bench` command, which times training steps."""
