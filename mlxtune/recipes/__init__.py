"""One file a command or public function, each read from top to bottom."""
