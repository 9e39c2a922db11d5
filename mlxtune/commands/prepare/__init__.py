"""Preparation of a command's work: options, data, model and plan."""
