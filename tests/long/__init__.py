"""Checks and measurements that take minutes or hours; README.md has a table of them."""
