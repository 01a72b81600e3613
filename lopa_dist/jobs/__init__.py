"""A batch job: prompts in, results, report, plots and logs out."""
