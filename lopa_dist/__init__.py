"""lopa_dist: large-batch text generation with diffusion language models, by Lookahead Parallel Decoding."""

__version__ = "0.1.0"
