"""LoRA and its family: targets, layers, initial values, optimizer."""
