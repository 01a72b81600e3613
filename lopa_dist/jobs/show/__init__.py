"""What a job shows: figures, pages, progress."""
