"""Several processes that share a run: they join, agree, split a model, and notice losses."""
