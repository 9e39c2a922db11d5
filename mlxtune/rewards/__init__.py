"""Rewards of sampled answers: built-in ones, and users' functions in a limited process."""
