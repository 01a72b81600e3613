"""How the models that ship with the package were trained: data, tokenizer, objectives, trainer."""
