"""A run as a person sees it: in text, on a page or in a notebook."""
