"""What several recipes do alike, from the dataset to the verdict."""
