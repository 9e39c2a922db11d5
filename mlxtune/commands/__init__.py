"""Commands: a file for each, which is also a public function, and the code they share."""
