"""A training step: the workload, its model, batches and weights, and how one step of it runs."""
