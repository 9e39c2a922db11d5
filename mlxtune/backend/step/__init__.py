"""One optimizer step: forward, loss, gradients, and how they are laid out."""
