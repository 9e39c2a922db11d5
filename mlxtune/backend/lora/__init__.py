"""LoRA and its variants: target projections, layers and optimizer."""
