"""A forward pass over packed examples: layers, head and loss, with their gradients."""
