"""The Hugging Face hub: data sets and adapters. Only this package imports huggingface_hub."""
