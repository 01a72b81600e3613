"""What a job shows: figures, pages, plots, progress."""
