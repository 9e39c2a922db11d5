"""One optimizer step: the forward pass, the loss, its gradients and the update."""
