"""What a person sees of a run, in text, on a page or in a notebook."""
