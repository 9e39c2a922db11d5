"""One file a command, each also a public function, and the code that several of them share."""
