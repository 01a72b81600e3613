"""One transformer, and loading checkpoints into it."""
