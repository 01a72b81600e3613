"""A job from its input to its results."""
