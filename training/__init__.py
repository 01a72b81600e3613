"""The training of the models that ship with the package: data, tokenizer, objectives and trainer."""
