"""Runs the command as `python -m mlxtune`."""

from mlxtune.cli import main

main()
