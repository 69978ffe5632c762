"""A rank: device, weights, KV pool, and the step that runs a batch. Device side."""
