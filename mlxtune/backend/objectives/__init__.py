"""Objectives on a device: the loss of a step of preferences, however it is split."""
