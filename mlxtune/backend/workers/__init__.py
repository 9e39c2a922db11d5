"""Several processes that share a run: they join, agree, split a model, and detect lost workers."""
