"""The engine: K/V pool, runner, commit, and the one loop."""
