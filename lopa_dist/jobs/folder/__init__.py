"""What a run folder holds, as a job writes it and others read it."""
