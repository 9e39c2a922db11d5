"""Times training against a peer: the command, its worker process, its result and its view."""
