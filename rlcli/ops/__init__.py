"""Tensor maths as pure functions on packed batches: no model, no parallelism, no configuration."""
