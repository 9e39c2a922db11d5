"""Serves a base model and its adapters in the protocol of the OpenAI API."""
