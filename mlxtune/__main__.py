"""Runs the `mlxtune` command for `python -m mlxtune`."""

from mlxtune.cli import main

main()
