"""Several processes that share a run: joining, agreeing, splitting a model, losing one."""
