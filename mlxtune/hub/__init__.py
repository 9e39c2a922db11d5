"""The Hugging Face hub: data sets from it, adapters to it. The only imports of huggingface_hub."""
