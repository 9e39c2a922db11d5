"""LoRA and its variants: target projections, layers, initial values and optimizer."""
