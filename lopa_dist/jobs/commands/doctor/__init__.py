"""`lopa-dist doctor`."""
