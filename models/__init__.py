"""How the bundled pair of models is made: text generator, tokenizer, training, export and evaluation."""
