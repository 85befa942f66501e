"""Makes the shipped demo model: corpus, tokenizer, training, evaluation. Commands: shared/demo_model/README.md."""
