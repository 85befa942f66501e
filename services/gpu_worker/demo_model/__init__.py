"""How the shipped demo model is made: corpus, tokenizer, training, evaluation. Run by hand, imported by no service."""
