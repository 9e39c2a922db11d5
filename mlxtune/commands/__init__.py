"""Commands: a file and a public function for each command, and the code that commands share."""
