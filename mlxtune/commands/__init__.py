"""One file a command, each also a public function, and what several of them share."""
