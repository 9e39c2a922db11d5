"""Tokenizers, chat templates and generation."""
