"""One transformer for all model families, and the loading of checkpoints into it."""
