"""The model that ships with the package: data, tokenizer, training."""
