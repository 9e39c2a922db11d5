"""What commands open and share: options, data, model, plan, and proofs of results."""
