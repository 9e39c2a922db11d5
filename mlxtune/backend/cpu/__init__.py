"""What is done for the CPU alone, where MLX's own operations are slow. Macs never come here."""
