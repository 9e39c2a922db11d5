"""A forward pass over a micro-batch: layers, head and loss, with their gradients."""
