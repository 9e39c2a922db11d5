"""Files of rows, by format."""
