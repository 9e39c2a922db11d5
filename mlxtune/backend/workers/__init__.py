"""Several processes that share a run: they join, agree, shard a model, and detect lost workers."""
