"""The commands beside the job itself."""
