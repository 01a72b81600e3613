"""A batch job: prompts in, results, report and logs out."""
